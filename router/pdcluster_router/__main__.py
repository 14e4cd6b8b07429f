"""``python -m pdcluster_router`` and ``pdcluster router``: flags in, settings checked, the server runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pdcluster_kube.access import SERVICE_ACCOUNT, read_pod
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.metaserver import Action
from pdcluster_protocol.secret import load_secret
from pdcluster_router.front.server import run
from pdcluster_router.settings import ENGINE_KEY_VARIABLE, Discovery, Settings, build_settings

LIMITS: Final = (
    "first_byte_timeout_s",
    "whole_answer_timeout_s",
    "idle_timeout_s",
    "reservation_timeout_s",
    "connect_timeout_s",
    "max_engine_connections",
    "engine_idle_s",
    "max_body_bytes",
    "max_buffered_bytes",
    "max_connections",
    "max_reservation_bytes",
    "max_header_bytes",
    "client_read_timeout_s",
    "client_idle_s",
    "client_linger_s",
    "probe_interval_s",
    "probe_timeout_s",
    "drain_timeout_s",
    "api_key_interval_s",
    "kube_timeout_s",
    "watch_timeout_s",
)
"""Settings whose flags need no more words than the page has."""
_DEFAULTS_IN_WORDS: Final = {
    "reservation_timeout_s": "none but the first byte's",
    "max_connections": "a quarter of the files that the process may open, at most 16,384",
}


def main(argv: Sequence[str]) -> int:
    """Serve until stopped. Returns the process's exit status: 0 after a signal, 2 when the settings cannot work."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = parse_settings(argv, os.environ)
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
    given = _parser().parse_args(argv)
    return build_settings(
        prefill_urls=tuple(given.prefill),
        decode_urls=tuple(given.decode),
        host=given.host,
        port=given.port,
        internal_port=given.internal_port,
        advertise_url=given.advertise_url,
        api_key_file=given.api_key_file,
        engine_api_key=environ.get(ENGINE_KEY_VARIABLE) or None,
        request_timeout_s=given.request_timeout,
        prefill_timeout_s=given.prefill_timeout,
        max_prefill_attempts=given.max_prefill_attempts,
        max_decode_attempts=given.max_decode_attempts,
        on_prefill_failure=given.on_prefill_failure,
        max_prefill_backlog_tokens=given.max_prefill_backlog_tokens,
        max_queued_requests=given.max_queued_requests,
        queue_timeout_s=given.queue_timeout,
        trace_file=given.trace_file,
        **_discovery_settings(given, environ, service_account),
        **{name: getattr(given, name) for name in LIMITS},
    )


def _discovery_settings(
    given: argparse.Namespace, environ: Mapping[str, str], service_account: Path
) -> dict[str, object]:
    """Flags win. Who names an API server gets none of the pod's own credentials: they are for the pod's own."""
    names = ("discovery", "namespace", "cluster", "kube_api", "kube_ca_file", "kube_token_file")
    named: dict[str, object] = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    if named.get("discovery") != Discovery.KUBERNETES.value:
        return named
    told = read_pod(environ, service_account).as_settings()
    if given.kube_api is not None:
        told = {name: value for name, value in told.items() if name == "namespace"}
    return {**told, **named}


def _parser() -> argparse.ArgumentParser:
    fields = Settings.model_fields
    parser = argparse.ArgumentParser(
        prog="pdcluster router", description="One OpenAI endpoint in front of prefill and decode engines."
    )
    add = parser.add_argument
    add("--prefill", metavar="URL", action="append", default=[], help="a prefill engine; repeat for more")
    add("--decode", metavar="URL", action="append", default=[], help="a decode engine; repeat for more")
    add("--host", help=f"address to listen on (default: {fields['host'].default})")
    add("--port", type=int, help=f"port for clients, 0 for any (default: {fields['port'].default})")
    add(
        "--internal-port",
        metavar="PORT",
        type=int,
        help="port for engines, metrics, the pool's pages and the operator, 0 for any (default: the one after --port)",
    )
    add(
        "--advertise-url",
        metavar="URL",
        help="where decode engines reach the internal port of this very process (default: http://HOST:INTERNAL_PORT)",
    )
    add("--api-key-file", metavar="PATH", help="the SHA-256 of each key that clients may show (default: none is asked)")
    add(
        "--request-timeout",
        metavar="SECONDS",
        type=float,
        help="for a whole request (default: none, as long as its answer flows)",
    )
    _add_failure_flags(parser)
    _add_discovery_flags(parser)
    add("--trace-file", metavar="PATH", help="append one JSON line for each ended request")
    limits = parser.add_argument_group("limits", "what each is for and why it is so: docs/operations.md")
    for name in LIMITS:
        default = fields[name].default
        is_count = isinstance(default, int)
        limits.add_argument(
            "--" + name.removesuffix("_s").replace("_", "-"),
            dest=name,
            type=int if is_count else float,
            metavar="N" if is_count else "SECONDS",
            help=f"default: {_DEFAULTS_IN_WORDS.get(name) or format(default, 'd' if is_count else 'g')}",
        )
    return parser


def _add_failure_flags(parser: argparse.ArgumentParser) -> None:
    fields = Settings.model_fields

    def add(flag: str, field: str, metavar: str, kind: type[int | float], text: str) -> None:
        parser.add_argument(flag, metavar=metavar, type=kind, help=f"{text} (default: {fields[field].default:g})")

    add("--prefill-timeout", "prefill_timeout_s", "SECONDS", float, "for one prefill attempt")
    add("--max-prefill-attempts", "max_prefill_attempts", "N", int, "prefill attempts that may fail for one request")
    add("--max-decode-attempts", "max_decode_attempts", "N", int, "decode engines that one request is sent to")
    parser.add_argument(
        "--on-prefill-failure",
        choices=[action.value for action in Action],
        help=f"when no prefill attempt is left (default: {fields['on_prefill_failure'].default.value})",
    )
    add("--max-prefill-backlog-tokens", "max_prefill_backlog_tokens", "N", int, "per healthy prefill engine")
    add("--max-queued-requests", "max_queued_requests", "N", int, "that wait until prefill has room")
    add("--queue-timeout", "queue_timeout_s", "SECONDS", float, "for the wait until prefill has room")


def _add_discovery_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("discovery", "where engines come from").add_argument
    default = Settings.model_fields["discovery"].default.value
    kinds = [kind.value for kind in Discovery]
    add("--discovery", choices=kinds, help=f"the URLs above, or EndpointSlices (default: {default})")
    add("--namespace", metavar="NAME", help="of the PDCluster (default: this pod's own)")
    add("--cluster", metavar="NAME", help="the PDCluster whose engines are found")
    add("--kube-api", metavar="URL", help="the API server (default: what Kubernetes tells a pod)")
    add("--kube-ca-file", metavar="PATH", help="the API server's authorities (default: a pod's own, else the system's)")
    add("--kube-token-file", metavar="PATH", help="our token (default: a pod's own, else none)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
