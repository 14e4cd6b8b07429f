"""``python -m pdcluster_operator`` and ``pdcluster operator``: reads the flags, checks them, runs the operator."""

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

from pdcluster_kube.access import SERVICE_ACCOUNT, read_pod
from pdcluster_operator.replica import serve
from pdcluster_operator.settings import FLAGS, Settings, build_settings
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.logs import start_logging
from pdcluster_protocol.open_files import raise_open_file_limit


def main(argv: Sequence[str]) -> int:
    """Run until stopped.

    Returns the exit status: 0 after a signal, 130 after an interrupt before the operator ran, 1 after a failure
    (Kubernetes starts the process anew), 2 if the settings cannot work.
    """
    try:
        settings = parse_settings(argv, os.environ, SERVICE_ACCOUNT)
        start_logging(settings.log_format)
        raise_open_file_limit()
        asyncio.run(serve(settings))
    except ConfigError as error:
        print(f"pdcluster operator: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # The interrupt came before the operator handled signals.
        return 130
    except Exception:
        # The top of the process: Kubernetes starts a new one, and nothing is lost by that.
        logging.getLogger(__name__).exception("operator ended")
        return 1
    return 0


def parse_settings(argv: Sequence[str], environ: Mapping[str, str], service_account: Path) -> Settings:
    """Settings from the command line, and from Kubernetes if this is a pod. Ends the process on an unknown flag.

    Raises:
        ConfigError: A value cannot work.
    """
    given = vars(_parser().parse_args(argv))
    is_elsewhere = any(given[name] is not None for name in ("kube_api", "kubeconfig", "kube_context"))
    told = _access_told_by(environ, service_account, is_elsewhere=is_elsewhere)
    named = {name: value for name, value in given.items() if value is not None}
    return build_settings(**{**told, **named})


def _access_told_by(environ: Mapping[str, str], service_account: Path, *, is_elsewhere: bool) -> dict[str, object]:
    """Settings that need no flag: our identity, environment variables, and in a pod the access to its API server.

    ``is_elsewhere``: flags name an API server, so the pod's own access is left out.
    """
    found: dict[str, object] = {"identity": f"{socket.gethostname()}_{secrets.token_hex(4)}"}
    told = read_pod(environ, service_account).as_settings()
    if namespace := told.pop("namespace", None):
        found["lease_namespace"] = namespace
    found |= FLAGS.told_by(environ)
    return found if is_elsewhere else {**found, **told}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdcluster operator", description="Keeps the PDClusters of a Kubernetes cluster as their users want them."
    )
    FLAGS.add_to(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
