"""``pdcluster drain``: an engine's preStop hook. Ends when the engine is idle, or its time is over.

Kubernetes marks a pod as terminating before it runs the hook, and sends SIGTERM after it. Meanwhile routers notice and
send nothing new, and requests that have begun end whole. An engine is idle when it has had no work for longer
than a router needs to notice, because until then a router may still send.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pdcluster_cli import numbers
from pdcluster_cli.commands import SUBCOMMANDS
from pdcluster_cli.pod.engine_http import Answer, NoAnswer, NotThere, add_engine_arguments, ask
from pdcluster_cli.pod.idleness import IdleWatch, Work, parse_work
from pdcluster_cli.tls_flags import tls_flags_of

DEFAULT_TIMEOUT_S: Final = 300.0
DEFAULT_IDLE_S: Final = 3.0
"""Seconds. A router notices a terminating pod within a second; 3 leave room for a busy API server."""
MAX_TIMEOUT_S: Final = 86400.0
POLL_S: Final = 0.25
_ASK_S: Final = 2.0
_LAST_ASK_S: Final = 0.5
"""Least seconds for a question, so that the last look still gets an answer from an engine that is well."""
_ENGINE_DEAD: Final = 503
"""Status of vLLM's /health if its engine core has died."""

Ask = Callable[[str, float], Answer]
"""Asks the engine for a path, within so many seconds."""


@dataclass(frozen=True, slots=True)
class Gone:
    """There is no engine any more."""

    why: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The engine's work is not known."""

    why: str


def main(words: Sequence[str]) -> int:
    """Wait, and print why the wait is over. Exit status 0 in any case: a failed preStop would only hide the reason."""
    given = make_parser().parse_args(words)
    tls = tls_flags_of(given)
    line = wait_until_idle(
        lambda path, timeout_s: ask(given.host, given.port, path, timeout_s=timeout_s, tls=tls),
        timeout_s=given.timeout_s,
        idle_s=given.idle_s,
    )
    print(f"pdcluster drain: {line}", flush=True)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser. Running pods have its options in their templates: to rename an option would restart every engine."""
    parser = argparse.ArgumentParser(prog="pdcluster drain", description=SUBCOMMANDS["drain"].help)
    add_engine_arguments(parser)
    add = parser.add_argument
    told = f"seconds to wait at most (default: {DEFAULT_TIMEOUT_S:g})"
    add("--timeout-s", type=numbers.seconds(0, MAX_TIMEOUT_S), default=DEFAULT_TIMEOUT_S, help=told)
    told = f"seconds without work after which the engine is idle (default: {DEFAULT_IDLE_S:g})"
    add("--idle-s", type=numbers.seconds(0, MAX_TIMEOUT_S), default=DEFAULT_IDLE_S, help=told)
    return parser


def wait_until_idle(ask_engine: Ask, *, timeout_s: float, idle_s: float) -> str:
    """Wait until the engine is idle. Returns why the wait is over. At most ``timeout_s``, and 1 s for a last look."""
    began_at = now = time.monotonic()
    watch = IdleWatch(idle_s)
    while True:
        seen = look(ask_engine, min(_ASK_S, max(_LAST_ASK_S, began_at + timeout_s - now)))
        now = time.monotonic()
        if isinstance(seen, Gone):
            return f"the engine is gone after {now - began_at:.1f} s: {seen.why}"
        if watch.hear(seen if isinstance(seen, Work) else None, now=now):
            return f"idle for {idle_s:g} s after {now - began_at:.1f} s"
        if now - began_at >= timeout_s:
            return f"gave up after {now - began_at:.1f} s: {seen if isinstance(seen, Work) else seen.why}"
        time.sleep(min(POLL_S, max(0.0, began_at + timeout_s - now)))


def look(ask_engine: Ask, timeout_s: float) -> Work | Gone | Unknown:
    """The engine's work at this moment. ``timeout_s``: for two requests together, but half a second for the second."""
    ends_at = time.monotonic() + timeout_s
    try:
        if ask_engine("/health", timeout_s).status == _ENGINE_DEAD:
            return Gone("its /health says that it has died")
        answer = ask_engine("/metrics", max(_LAST_ASK_S, ends_at - time.monotonic()))
    except NotThere as error:
        return Gone(str(error))
    except NoAnswer as error:
        return Unknown(str(error))
    work = parse_work(answer.text) if answer.status == 200 else None
    return work or Unknown("its /metrics say nothing of requests (was it started with --disable-log-stats?)")
