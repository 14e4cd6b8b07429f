"""``pdcluster ready``: an engine's readiness probe. The engine answers, and on decode so does its side channel.

Without the secret the probe gets one answer from a side channel: why its frame is refused. The answer comes from the
thread that serves prefill engines, so it shows that it lives. A TCP connection alone shows only that the operating
system has the port. Prefill listens on no side channel: it calls decode's. Only a real request can show that this works
(``POST /pdcluster/verify`` of a router).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Final

from pdcluster_cli import numbers
from pdcluster_cli.commands import SUBCOMMANDS
from pdcluster_cli.engine_http import NoAnswer, NotThere, add_engine_arguments, ask
from pdcluster_cli.zmtp import NotZmtp, ask_router
from pdcluster_protocol.labels import Role
from pdcluster_protocol.launch import SIDE_CHANNEL_PORT

DEFAULT_TIMEOUT_S: Final = 2.0
MAX_TIMEOUT_S: Final = 3600.0
QUESTION: Final = b"\0ready?"
"""A frame of version 0, which there never was: refused by every version, and changes nothing."""
ANSWER_VERSION: Final = 3
"""First byte of a side channel's frame (``pdcluster_protocol.side_channel``, which costs too much to import here)."""


def main(words: Sequence[str]) -> int:
    """Status 0 when the engine can serve, else 1 and one line that says why not."""
    given = make_parser().parse_args(words)
    deadline = time.monotonic() + given.timeout_s
    role = Role(given.role)
    problem = _http_problem(given.host, given.port, deadline)
    if not problem and role is Role.DECODE:
        ports = range(given.side_channel_port, given.side_channel_port + given.ranks)
        problem = next((why for port in ports if (why := _side_channel_problem(given.host, port, deadline))), "")
    print(f"pdcluster ready: not ready: {problem}" if problem else "pdcluster ready: ready", flush=True)
    return 1 if problem else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdcluster ready", description=SUBCOMMANDS["ready"].help)
    add_engine_arguments(parser)
    add = parser.add_argument
    add("--role", choices=[role.value for role in Role], required=True, help="what the engine does")
    add(
        "--side-channel-port",
        type=numbers.port,
        default=SIDE_CHANNEL_PORT,
        help=f"of the first decode rank in this pod (default: {SIDE_CHANNEL_PORT})",
    )
    add(
        "--ranks",
        type=numbers.ranks,
        default=1,
        help="decode ranks in this pod, on one port after the other (default: 1)",
    )
    told = f"seconds for all questions together (default: {DEFAULT_TIMEOUT_S:g})"
    add("--timeout-s", type=numbers.seconds(0.1, MAX_TIMEOUT_S), default=DEFAULT_TIMEOUT_S, help=told)
    return parser


def _http_problem(host: str, port: int, deadline: float) -> str:
    """Why the engine's HTTP server is not well; empty when it is."""
    try:
        status = ask(host, port, "/health", timeout_s=max(0.001, deadline - time.monotonic())).status
    except (NotThere, NoAnswer) as error:
        return str(error)
    return "" if status == 200 else f"/health answers {status}"


def _side_channel_problem(host: str, port: int, deadline: float) -> str:
    """Why the side channel on this port is not well; empty when it is."""
    try:
        answer = ask_router(host, port, QUESTION, deadline=deadline)
    except TimeoutError:
        return f"the side channel on port {port} does not answer in time"
    except (OSError, NotZmtp) as error:
        return f"the side channel on port {port} cannot be asked: {error}"
    return "" if answer[:1] == bytes([ANSWER_VERSION]) else f"on port {port} listens no side channel of this version"
