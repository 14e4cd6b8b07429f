"""``pdcluster ready``: an engine's readiness probe. It asks the engine, and on decode each rank's side channel.

Without the secret the probe gets only one answer from a side channel: why its frame is refused. The thread that serves
prefill engines answers, so the answer shows that this thread lives. A TCP connection alone shows only that the
operating system has the port. Prefill has no side channel: it calls decode's. Only a real request can show that its
calls work (``POST /pdcluster/verify`` of a router).

With ``--alive`` it is the liveness probe of an engine with TLS: kubelets have no certificate to show. No restart mends
a certificate, so an engine counts as alive even if one end refuses the other's certificate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Final

from pdcluster_cli import numbers
from pdcluster_cli.commands import SUBCOMMANDS
from pdcluster_cli.pod.engine_http import NoAgreement, NoAnswer, NotThere, add_engine_arguments, ask
from pdcluster_cli.pod.zmtp import NotZmtp, ask_router
from pdcluster_cli.tls_flags import tls_flags_of
from pdcluster_protocol.labels import Role
from pdcluster_protocol.launch import SIDE_CHANNEL_PORT

DEFAULT_TIMEOUT_S: Final = 2.0
MAX_TIMEOUT_S: Final = 3600.0
QUESTION: Final = b"\0ready?"
"""A frame of version 0, which never existed: every version refuses it, and it changes nothing."""
ANSWER_VERSION: Final = 4
"""First byte of a side channel's frames, as in ``pdcluster_protocol.side_channel``, which is slow to import."""


def main(words: Sequence[str]) -> int:
    """Exit status 0: the engine can serve (``--alive``: it lives); 1: it cannot, and a line says why."""
    given = make_parser().parse_args(words)
    deadline = time.monotonic() + given.timeout_s
    role = Role(given.role)
    problem = _http_problem(given, deadline)
    if not problem and role is Role.DECODE and not given.alive:
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
    add("--alive", action="store_true", help="ask only whether it lives: /health, whatever certificates say")
    told = f"seconds for all questions together (default: {DEFAULT_TIMEOUT_S:g})"
    add("--timeout-s", type=numbers.seconds(0.1, MAX_TIMEOUT_S), default=DEFAULT_TIMEOUT_S, help=told)
    return parser


def _http_problem(given: argparse.Namespace, deadline: float) -> str:
    """Why the engine's HTTP server cannot serve; empty: it can. With ``--alive``: why it does not live."""
    timeout_s, tls = max(0.001, deadline - time.monotonic()), tls_flags_of(given)
    try:
        status = ask(given.host, given.port, "/health", timeout_s=timeout_s, tls=tls, trusts_any=given.alive).status
    except NoAgreement as error:
        return "" if given.alive else str(error)
    except (NotThere, NoAnswer) as error:
        return str(error)
    return "" if status == 200 else f"/health answers {status}"


def _side_channel_problem(host: str, port: int, deadline: float) -> str:
    """Why the side channel on this port cannot serve; empty: it can."""
    try:
        answer = ask_router(host, port, QUESTION, deadline=deadline)
    except TimeoutError:
        return f"the side channel on port {port} does not answer in time"
    except (OSError, NotZmtp) as error:
        return f"the side channel on port {port} cannot be asked: {error}"
    return "" if answer[:1] == bytes([ANSWER_VERSION]) else f"on port {port} listens no side channel of this version"
