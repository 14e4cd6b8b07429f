"""``python -m pdcluster_operator`` and ``pdcluster operator``: flags in, settings checked, the operator runs."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pdcluster_operator.serving import serve
from pdcluster_operator.settings import Settings, build_settings
from pdcluster_protocol.errors import ConfigError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes tells a pod who it is."""
LIMITS: Final = (
    "call_timeout_s",
    "watch_silence_s",
    "lease_duration_s",
    "lease_renew_s",
    "lease_retry_s",
    "resync_s",
    "workers",
    "reconcile_timeout_s",
    "stuck_s",
    "verify_timeout_s",
)
"""Settings whose flags need no more words than the page has."""


def main(argv: Sequence[str]) -> int:
    """Run until stopped. Returns the exit status: 0 after a signal, 1 to be started anew, 2 if settings cannot work."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = parse_settings(argv, os.environ, SERVICE_ACCOUNT)
    except ConfigError as error:
        print(f"pdcluster operator: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(serve(settings))
    except KeyboardInterrupt:  # Before the operator was there to take it.
        return 130
    except Exception:
        # The top of the process: Kubernetes starts it anew, and nothing is lost by that.
        logging.getLogger(__name__).exception("operator ended")
        return 1
    return 0


def parse_settings(argv: Sequence[str], environ: Mapping[str, str], service_account: Path) -> Settings:
    """Settings from the command line, and what Kubernetes tells a pod. Ends the process on an unknown flag.

    Raises:
        ConfigError: A value cannot work.
    """
    given = vars(_parser().parse_args(argv))
    told = _access_told_by(environ, service_account, is_elsewhere=given["kube_api"] is not None)
    named = {name: value for name, value in given.items() if value is not None}
    return build_settings(**{**told, **named})


def _access_told_by(environ: Mapping[str, str], service_account: Path, *, is_elsewhere: bool) -> dict[str, object]:
    """What a pod knows without flags. ``is_elsewhere``: of another API server than the pod's own."""
    found: dict[str, object] = {"identity": f"{socket.gethostname()}_{secrets.token_hex(4)}"}
    namespace = service_account / "namespace"
    if namespace.exists():
        found["lease_namespace"] = namespace.read_text().strip()
    if image := environ.get("PDCLUSTER_ROUTER_IMAGE"):
        found["router_image"] = image
    if not is_elsewhere and (host := environ.get("KUBERNETES_SERVICE_HOST")):
        port = environ.get("KUBERNETES_SERVICE_PORT", "443")
        found["kube_api"] = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        found["kube_ca_file"] = service_account / "ca.crt"
        found["kube_token_file"] = service_account / "token"
    return found


def _parser() -> argparse.ArgumentParser:
    fields = Settings.model_fields
    parser = argparse.ArgumentParser(
        prog="pdcluster operator", description="Keeps the PDClusters of a Kubernetes cluster as their users want them."
    )
    add = parser.add_argument
    add("--router-image", metavar="IMAGE", help="of the routers (default: $PDCLUSTER_ROUTER_IMAGE)")
    add(
        "--namespace",
        dest="namespaces",
        metavar="NAME",
        action="append",
        help="keep the PDClusters of this namespace; repeat for more (default: all namespaces)",
    )
    add("--kube-api", metavar="URL", help="the API server (default: what Kubernetes tells a pod)")
    add("--kube-ca-file", metavar="PATH", help="the API server's authorities (default: a pod's own, else the system's)")
    add("--kube-token-file", metavar="PATH", help="our token (default: a pod's own, else none)")
    add(
        "--api-server-port",
        dest="api_server_ports",
        metavar="PORT",
        type=int,
        action="append",
        help="let routers' NetworkPolicies reach the API server here; repeat for more (default: 443 and 6443)",
    )
    add("--lease-namespace", metavar="NAME", help="of the Lease (default: the pod's own)")
    add("--lease-name", metavar="NAME", help=f"of the Lease (default: {fields['lease_name'].default})")
    add("--identity", metavar="NAME", help="who holds the Lease (default: the host's name and a random part)")
    add("--host", metavar="ADDRESS", help="for probes and metrics (default: all)")
    add("--port", type=int, help=f"for probes and metrics, 0 for any (default: {fields['port'].default})")
    limits = parser.add_argument_group("limits", "what each is for and why it is so: docs/operations.md")
    for name in LIMITS:
        default = fields[name].default
        is_count = isinstance(default, int)
        limits.add_argument(
            "--" + name.removesuffix("_s").replace("_", "-"),
            dest=name,
            type=int if is_count else float,
            metavar="N" if is_count else "SECONDS",
            help=f"default: {default if is_count else format(default, 'g')}",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
