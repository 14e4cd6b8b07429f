"""``pdcluster top``: each router's engines, queues, failures and last requests, refreshed until Ctrl-C. Plain text."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from pdcluster_cli import numbers
from pdcluster_cli.cluster.routers import Answers, EarlierAnswer, Unanswered, add_router_flags, ask_routers
from pdcluster_cli.cluster.status_text import describe_status
from pdcluster_cli.commands import SUBCOMMANDS
from pdcluster_protocol.errors import NO_JSON
from pdcluster_protocol.pool_page import POOL_PATH, PoolPage
from pdcluster_protocol.status_page import STATUS_PATH, StatusPage
from pdcluster_router.core.telemetry.scrub import printable

DEFAULT_INTERVAL_S: Final = 2.0
MAX_INTERVAL_S: Final = 3600.0
_HOME_AND_CLEAR: Final = "\x1b[H\x1b[2J"
"""Written to a terminal together with the text, so that nothing flickers."""
_OF_EARLIER_VERSION: Final = "It is of an earlier version: its last requests are not told."


def main(words: Sequence[str]) -> int:
    """Exit status 0 after Ctrl-C, or with ``--once`` if a router has answered; else 2."""
    given = make_parser().parse_args(words)
    try:
        while True:
            is_told = _tell(given)
            if given.once:
                return 0 if is_told else 2
            time.sleep(given.interval_s)
    except KeyboardInterrupt:
        return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdcluster top", description=SUBCOMMANDS["top"].help)
    add_router_flags(parser)
    parser.add_argument("--once", action="store_true", help="one look, and the end")
    told = f"seconds from one look to the next (default: {DEFAULT_INTERVAL_S:g})"
    interval = numbers.seconds(0.1, MAX_INTERVAL_S)
    parser.add_argument("--interval-s", type=interval, default=DEFAULT_INTERVAL_S, help=told)
    return parser


def _tell(given: argparse.Namespace) -> bool:
    """Print one look. Returns whether a router has answered."""
    try:
        answers = ask_routers(given, STATUS_PATH, older=POOL_PATH)
    except Unanswered as error:
        print(f"pdcluster top: {error}", file=sys.stderr, flush=True)
        return False
    pages = [_page(router, body) for router, body in answers.items()]
    begin = _HOME_AND_CLEAR if sys.stdout.isatty() and not given.once else ""
    print(begin + "\n\n".join(pages), flush=True)
    return _has_answer(answers)


def _has_answer(answers: Answers) -> bool:
    return any(isinstance(body, bytes) for body in answers.values())


def _page(router: str, body: bytes | str) -> str:
    if isinstance(body, str):
        return printable(f"{router}: {body}")
    try:
        if isinstance(body, EarlierAnswer):
            page = StatusPage(pool=msgspec.json.decode(body, type=PoolPage), recent=())
            return f"{describe_status(page, router)}\n\n{_OF_EARLIER_VERSION}"
        return describe_status(msgspec.json.decode(body, type=StatusPage), router)
    except NO_JSON as error:
        return printable(f"{router}: its answer cannot be read ({error}): is it a router of this version?")
