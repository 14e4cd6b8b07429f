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

from pdcluster_kube.access import SERVICE_ACCOUNT, read_pod
from pdcluster_operator.serving import serve
from pdcluster_operator.settings import Settings, build_settings
from pdcluster_protocol.errors import ConfigError

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
        asyncio.run(serve(parse_settings(argv, os.environ, SERVICE_ACCOUNT)))
    except ConfigError as error:
        print(f"pdcluster operator: {error}", file=sys.stderr)
        return 2
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
    is_elsewhere = any(given[name] is not None for name in ("kube_api", "kubeconfig", "kube_context"))
    told = _access_told_by(environ, service_account, is_elsewhere=is_elsewhere)
    named = {name: value for name, value in given.items() if value is not None}
    return build_settings(**{**told, **named})


def _access_told_by(environ: Mapping[str, str], service_account: Path, *, is_elsewhere: bool) -> dict[str, object]:
    """What a pod knows without flags. ``is_elsewhere``: flags name an API server that is not the pod's own."""
    found: dict[str, object] = {"identity": f"{socket.gethostname()}_{secrets.token_hex(4)}"}
    told = read_pod(environ, service_account).as_settings()
    if namespace := told.pop("namespace", None):
        found["lease_namespace"] = namespace
    names = {"router_image": "PDCLUSTER_ROUTER_IMAGE", "kubeconfig": "KUBECONFIG"}
    found |= {name: value for name, variable in names.items() if (value := environ.get(variable))}
    return found if is_elsewhere else {**found, **told}


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
    add("--kube-api", metavar="URL", help="the API server (default: what Kubernetes tells a pod, else --kubeconfig)")
    add("--kubeconfig", metavar="PATH", help="where the API server is, and who we are (default: kubectl's)")
    add("--context", dest="kube_context", metavar="NAME", help="of the kubeconfig (default: its current one)")
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
