"""``python -m pdcluster_router`` and ``pdcluster router``: flags in, settings checked, the server runs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.server import run
from pdcluster_router.settings import Settings, build_settings


def main(argv: Sequence[str]) -> int:
    """Serve until stopped. Returns the process's exit status: 0 after a signal, 2 when the settings cannot work."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        run(parse_settings(argv))
    except ConfigError as error:
        print(f"pdcluster router: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # Before the server was there to take it.
        return 130
    return 0


def parse_settings(argv: Sequence[str]) -> Settings:
    """Settings from the command line. Ends the process on a flag that does not exist, as argparse does.

    Raises:
        ConfigError: A value cannot work.
    """
    given = _parser().parse_args(argv)
    return build_settings(
        prefill_urls=tuple(given.prefill),
        decode_urls=tuple(given.decode),
        host=given.host,
        port=given.port,
        advertise_url=given.advertise_url,
        request_timeout_s=given.request_timeout,
        trace_file=given.trace_file,
    )


def _parser() -> argparse.ArgumentParser:
    fields = Settings.model_fields
    parser = argparse.ArgumentParser(
        prog="pdcluster router", description="One OpenAI endpoint in front of prefill and decode engines."
    )
    add = parser.add_argument
    add("--prefill", metavar="URL", action="append", required=True, help="a prefill engine; repeat for more")
    add("--decode", metavar="URL", action="append", required=True, help="a decode engine; repeat for more")
    add("--host", help=f"address to listen on (default: {fields['host'].default})")
    add("--port", type=int, help=f"port to listen on, 0 for any (default: {fields['port'].default})")
    add(
        "--advertise-url",
        metavar="URL",
        help="where decode engines reach this very process (default: http://HOST:PORT of the two above)",
    )
    add(
        "--request-timeout",
        metavar="SECONDS",
        type=float,
        help=f"for a whole request (default: {fields['request_timeout_s'].default:g})",
    )
    add("--trace-file", metavar="PATH", help="append one JSON line for each ended request")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
