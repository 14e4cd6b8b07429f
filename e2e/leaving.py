"""Engines that go: how long each takes, and whether it went only when it had nothing left to do."""

from __future__ import annotations

import http.client
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from e2e.subject import PORT, Subject, name_of
from integration.harness import get_text
from pdcluster_cli.drain import DEFAULT_IDLE_S
from pdcluster_cli.idleness import parse_work

SOON_S: Final = 45.0
"""Well below the pool's ``drain.timeoutSeconds``: 5 to 20 s are usual, and an engine that still gets work never goes
before that timeout."""
IDLE_S: Final = DEFAULT_IDLE_S - 1.5
"""What is left of the drain's own idle time when it is seen from outside, every half second on a busy machine."""
_LOOK_S: Final = 0.5
_ASK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Departure:
    """One engine's. ``took_s``: from its deletion until no pod is left, as far as a look a second can tell.
    ``idle_s``: for how long at its end it answered and had nothing to do."""

    pod: str
    took_s: float
    idle_s: float


def watch_leaving(pool: Subject, number: int, limit_s: float) -> list[Departure]:
    """Waits until so many engines have begun to go and are gone.

    Raises:
        TimeoutError: They are not within ``limit_s``.
    """
    seen: dict[str, tuple[float, Future[float]]] = {}
    gone: dict[str, Departure] = {}
    deadline = time.monotonic() + limit_s
    with ThreadPoolExecutor(number, thread_name_prefix="leaving") as threads:
        while len(gone) < number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(gone)} of {number} engines are gone after {limit_s:.0f} s")
            there = {name_of(pod): pod for pod in pool.engines()}
            for name, pod in there.items():
                if "deletionTimestamp" in pod["metadata"] and name not in seen:
                    url = f"http://{pod['status']['podIP']}:{PORT}"
                    seen[name] = time.monotonic(), threads.submit(watch_idle, url, deadline)
            for name, (began_at, idle) in seen.items():
                if name not in there and name not in gone:
                    gone[name] = Departure(name, time.monotonic() - began_at, idle.result())
            time.sleep(_LOOK_S)
    return [*gone.values()]


def watch_idle(url: str, deadline: float) -> float:
    """For how many seconds the engine had nothing to do when it answered last. Waits until it answers no more, or for
    ``deadline`` of the monotonic clock."""
    began_at = busy_at = idle_at = time.monotonic()
    num_ended = -1
    while time.monotonic() < deadline:
        try:
            work = parse_work(get_text(f"{url}/metrics", timeout_s=_ASK_S))
        except (OSError, http.client.HTTPException):
            break
        now = time.monotonic()
        assert work is not None, "an engine's metrics say nothing of requests"
        if work.num_running or work.num_waiting or work.num_ended != num_ended:
            busy_at, num_ended = now, work.num_ended
        idle_at = now
        time.sleep(_LOOK_S)
    return idle_at - max(began_at, busy_at)


def hasty(departures: list[Departure]) -> list[Departure]:
    """Those that went while they still had something to do."""
    return [one for one in departures if one.idle_s < IDLE_S]


def late(departures: list[Departure]) -> list[Departure]:
    """Those that took so long that they were not left alone."""
    return [one for one in departures if one.took_s > SOON_S]


def spans(departures: list[Departure]) -> str:
    """``went in 9 s (idle 2.5 s), 12 s (idle 3.0 s)``."""
    return "went in " + ", ".join(f"{one.took_s:.0f} s (idle {one.idle_s:.1f} s)" for one in departures)
