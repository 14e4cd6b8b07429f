"""``python -m pdcluster_router`` and ``pdcluster router``: read the flags, check the settings, run the server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

from pdcluster_kube.access import SERVICE_ACCOUNT, read_pod
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.logs import start_logging
from pdcluster_protocol.secret import load_secret
from pdcluster_router.files.reading import read_file
from pdcluster_router.front.start import run
from pdcluster_router.processes.seat import read_seat
from pdcluster_router.settings.forms import Discovery
from pdcluster_router.settings.router_settings import (
    FLAGS,
    SETTINGS_FLAG,
    SETTINGS_VARIABLE,
    VARIABLES_PREFIX,
    Settings,
    build_settings,
)
from pdcluster_router.settings.span_settings import span_settings_told


def main(argv: Sequence[str]) -> int:
    """Serve until stopped. Returns the exit status: 0, 130 after Ctrl-C before the server runs, 2 on a ConfigError.
    Of several processes also 1, if they could not go on, or that of the first one that could not start."""
    # Else gRPC's library writes a line of its own for each handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        settings = parse_settings(argv, os.environ)
        seat = read_seat(os.environ)
        start_logging(settings.log_format, **({} if seat is None else {"seat": seat.number}))
        reread = partial(parse_settings, argv, os.environ) if _names_file(argv, os.environ) else None
        secret = load_secret(os.environ, host=settings.host)
        return run(settings, secret, reread, argv=argv, seat=seat)
    except ConfigError as error:
        print(f"pdcluster router: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # Ctrl-C before the server handled signals.
        return 130


def parse_settings(
    argv: Sequence[str], environ: Mapping[str, str] = MappingProxyType({}), service_account: Path = SERVICE_ACCOUNT
) -> Settings:
    """Settings from the command line, else from the router's own variables, else from those of others, else from a
    file, else from what Kubernetes gives a pod.

    argparse ends the process if a flag does not exist.

    Raises:
        ConfigError: A value cannot work.
    """
    given = {name: value for name, value in vars(_parser().parse_args(argv)).items() if value is not None}
    path = given.pop("settings", environ.get(SETTINGS_VARIABLE) or None)
    filed = _read_settings(path) if path is not None else {}
    ours = FLAGS.told_by_prefix({name: value for name, value in environ.items() if name != SETTINGS_VARIABLE})
    has_endpoint = "otlp_endpoint" in filed
    theirs = span_settings_told({**ours, **given}, FLAGS.told_by(environ), environ, has_endpoint=has_endpoint)
    told = {**filed, **theirs, **ours, **given}
    sources = {name: f"{SETTINGS_FLAG} {path}: {FLAGS.key_of(name)}" for name in filed}
    sources |= {name: FLAGS.variables[name] for name in theirs} | {name: FLAGS.variable_of(name) for name in ours}
    sources = {name: source for name, source in sources.items() if name not in given}
    return build_settings(sources, **{**_told_by_pod(told, environ, service_account), **told})


def _names_file(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether there is a file of settings, which may be another one later."""
    return bool(_parser().parse_args(argv).settings or environ.get(SETTINGS_VARIABLE))


def _read_settings(path: str) -> dict[str, object]:
    """Raises: ConfigError: The file cannot be read, or has something that is no setting."""
    # pathlib's ``exists`` raises where a disk fails.
    if not path or (os.path.exists(path) and not os.path.isfile(path)):  # noqa: PTH110, PTH113
        raise ConfigError(f"{SETTINGS_FLAG} {path or 'is empty'}: name a file")
    raw = read_file(Path(path), SETTINGS_FLAG)
    try:
        return FLAGS.told_in(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{SETTINGS_FLAG} {path}: it is not text in UTF-8: name the file of settings") from error
    except ConfigError as error:
        raise ConfigError(f"{SETTINGS_FLAG} {path}: {error}") from error


def _told_by_pod(given: Mapping[str, object], environ: Mapping[str, str], service_account: Path) -> dict[str, object]:
    """The settings that Kubernetes gives this pod; none without discovery by Kubernetes. A user who names an API server
    gets only the namespace, because the pod's credentials are for the pod's own API server.
    """
    if given.get("discovery") != Discovery.KUBERNETES.value:
        return {}
    told = read_pod(environ, service_account).as_settings()
    return {name: value for name, value in told.items() if name == "namespace" or "kube_api" not in given}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdcluster router", description="One OpenAI endpoint in front of prefill and decode engines."
    )
    parser.add_argument(
        SETTINGS_FLAG,
        metavar="PATH",
        help=f"File with flags in TOML. A flag, or {VARIABLES_PREFIX}NAME, counts before it.",
    )
    FLAGS.add_to(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
