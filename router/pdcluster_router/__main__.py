"""``python -m pdcluster_router`` and ``pdcluster router``: flags in, settings checked, the server runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pdcluster_kube.access import SERVICE_ACCOUNT, read_pod
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.logs import start_logging
from pdcluster_protocol.secret import load_secret
from pdcluster_router.front.server import run
from pdcluster_router.settings import FLAGS, Discovery, Settings, build_settings


def main(argv: Sequence[str]) -> int:
    """Serve until stopped. Returns the process's exit status: 0 after a signal, 2 when the settings cannot work."""
    try:
        settings = parse_settings(argv, os.environ)
        start_logging(settings.log_format)
        run(settings, load_secret(os.environ, host=settings.host))
    except ConfigError as error:
        print(f"pdcluster router: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # Before the server was there to take it.
        return 130
    return 0


def parse_settings(
    argv: Sequence[str], environ: Mapping[str, str] = MappingProxyType({}), service_account: Path = SERVICE_ACCOUNT
) -> Settings:
    """Settings from the command line, and from what Kubernetes tells its pods.

    Ends the process on a flag that does not exist, as argparse does.

    Raises:
        ConfigError: A value cannot work.
    """
    given = {name: value for name, value in vars(_parser().parse_args(argv)).items() if value is not None}
    return build_settings(**{**_told_by_pod(given, environ, service_account), **FLAGS.told_by(environ), **given})


def _told_by_pod(given: Mapping[str, object], environ: Mapping[str, str], service_account: Path) -> dict[str, object]:
    """A user who names an API server gets none of the pod's credentials: they are for the pod's own server."""
    if given.get("discovery") != Discovery.KUBERNETES.value:
        return {}
    told = read_pod(environ, service_account).as_settings()
    return {name: value for name, value in told.items() if name == "namespace" or "kube_api" not in given}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdcluster router", description="One OpenAI endpoint in front of prefill and decode engines."
    )
    FLAGS.add_to(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
