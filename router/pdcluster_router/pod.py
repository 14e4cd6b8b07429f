"""What Kubernetes tells a pod of its API server: two variables, and a folder with our credentials.

Source of truth: Kubernetes' page "Accessing the Kubernetes API from a Pod", "Directly accessing the REST API".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def api_server_of(environ: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT) -> dict[str, object]:
    """Settings by name, only those that are known. Outside of a pod: none."""
    told: dict[str, object] = {}
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if host and port:
        told["kube_api"] = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    files = {"kube_ca_file": service_account / "ca.crt", "kube_token_file": service_account / "token"}
    told |= {name: path for name, path in files.items() if path.is_file()}
    namespace_file = service_account / "namespace"
    if namespace_file.is_file():
        told["namespace"] = namespace_file.read_text().strip()
    return told
