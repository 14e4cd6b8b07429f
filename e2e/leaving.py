"""Engines that go: how long each takes, and whether it went only when it had nothing left to do."""

from __future__ import annotations

import http.client
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from e2e.subject import PORT, Subject, name_of
from integration.harness import get_text
from pdcluster_cli.drain import DEFAULT_IDLE_S
from pdcluster_cli.idleness import parse_work
from pdcluster_protocol.labels import Role

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


class Leaving:
    """Looks at all engines that are not going when it begins, for some of them will. One thread owns it."""

    def __init__(self, pool: Subject) -> None:
        self._pool = pool
        self._stopped = threading.Event()
        staying = [pod for role in Role for pod in pool.pods(role)]
        engines = {name_of(pod): f"http://{pod['status']['podIP']}:{PORT}" for pod in staying}
        self._threads = ThreadPoolExecutor(len(engines), thread_name_prefix="leaving")
        self._idle = {name: self._threads.submit(watch_idle, url, self._stopped) for name, url in engines.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stopped.set()
        self._threads.shutdown()

    def wait_gone(self, number: int, limit_s: float) -> list[Departure]:
        """So many of them have begun to go and are gone.

        Raises:
            TimeoutError: They are not within ``limit_s``.
        """
        going_at: dict[str, float] = {}
        gone: dict[str, Departure] = {}
        deadline = time.monotonic() + limit_s
        while len(gone) < number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(gone)} of {number} engines are gone after {limit_s:.0f} s")
            there = {name_of(pod): "deletionTimestamp" in pod["metadata"] for pod in self._pool.engines()}
            now = time.monotonic()
            for name, idle in self._idle.items():
                if there.get(name, True):
                    going_at.setdefault(name, now)
                if name not in there and name not in gone:
                    gone[name] = Departure(name, now - going_at[name], idle.result())
            time.sleep(_LOOK_S)
        return [*gone.values()]


def watch_idle(url: str, stopped: threading.Event) -> float:
    """For how many seconds the engine had nothing to do when it answered last. Waits until it answers no more, or for
    ``stopped``."""
    busy_at = idle_at = time.monotonic()
    num_ended = -1
    while not stopped.wait(_LOOK_S):
        try:
            work = parse_work(get_text(f"{url}/metrics", timeout_s=_ASK_S))
        except (OSError, http.client.HTTPException):
            break
        assert work is not None, "an engine's metrics say nothing of requests"
        idle_at = time.monotonic()
        if work.num_running or work.num_waiting or work.num_ended != num_ended:
            busy_at, num_ended = idle_at, work.num_ended
    return idle_at - busy_at


def hasty(departures: list[Departure]) -> list[Departure]:
    """Those that went while they still had something to do."""
    return [one for one in departures if one.idle_s < IDLE_S]


def late(departures: list[Departure]) -> list[Departure]:
    """Those that took so long that they were not left alone."""
    return [one for one in departures if one.took_s > SOON_S]


def spans(departures: list[Departure]) -> str:
    """``went in 9 s (idle 2.5 s), 12 s (idle 3.0 s)``."""
    return "went in " + ", ".join(f"{one.took_s:.0f} s (idle {one.idle_s:.1f} s)" for one in departures)
