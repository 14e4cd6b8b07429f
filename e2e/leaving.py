"""Engines that go: how long each takes, and whether it went only when it had nothing left to do."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from e2e.cluster import eventually
from e2e.subject import PORT, Object, Subject, name_of
from integration.harness import HttpError, get_text
from pdcluster_cli.pod.drain import DEFAULT_IDLE_S
from pdcluster_cli.pod.idleness import Work, parse_work
from pdcluster_protocol.labels import Role

SOON_S: Final = 135.0
"""Well below the pool's ``drain.timeoutSeconds``: 5 to 20 s are usual, and an engine that still gets work never goes
before that timeout."""
IDLE_S: Final = DEFAULT_IDLE_S - 0.5
"""The drain's own idle time, or nearly: who looks from outside sees no less of it, however slow the machine."""
GIVEN_BACK_S: Final = 45.0
"""A lease, a quarantine and a hold, one after the other, take 11; what only a request's deadline gives back takes
minutes."""
_LOOK_S: Final = 0.5
_BEGUN_S: Final = 0.1
_ASK_S: Final = 5.0
_LAST_LOOK_S: Final = 30.0
"""A look that is under way when the pod is gone: to connect, to hear the head, to hear the rest, 5 s each at most."""


@dataclass(frozen=True, slots=True)
class Departure:
    """One engine's. ``took_s``: from its deletion until no pod is left, as far as a look a second can tell.
    ``idle_s``: for how long at its end it had nothing to do, at most."""

    pod: str
    took_s: float
    idle_s: float


class Leaving:
    """Looks at all engines that are not going when it begins, for some of them will. One thread owns it."""

    def __init__(self, pool: Subject) -> None:
        self._pool = pool
        staying = [pod for role in Role for pod in pool.pods(role)]
        engines = {name_of(pod): url_of(pod) for pod in staying}
        self._threads = ThreadPoolExecutor(len(engines), thread_name_prefix="leaving")
        self._gone = {name: threading.Event() for name in engines}
        self._idle = {name: self._threads.submit(watch_idle, url, self._gone[name]) for name, url in engines.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for gone in self._gone.values():
            gone.set()
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
                    self._gone[name].set()
                    gone[name] = Departure(name, now - going_at[name], idle.result(_LAST_LOOK_S))
            time.sleep(_LOOK_S)
        return [*gone.values()]


@dataclass(slots=True)
class LastIdleness:
    """For how long an engine had nothing to do when it went, seen from outside: an upper bound, for a late answer must
    not make a patient engine hasty. Pure. One owner."""

    busy_at: float
    """Not later than when it last had something to do."""
    silent_at: float | None = None
    """Since when it has not answered; it had gone by then, or is so slow that it counts as patient."""
    num_ended: int = -1

    def hear(self, work: Work | None, *, asked_at: float, now: float) -> None:
        """``work``: what it answered to a question of ``asked_at``; None: nothing."""
        if work is None:
            self.silent_at = self.silent_at or now
            return
        self.silent_at = None
        if not work.is_none or work.num_ended != self.num_ended:
            self.busy_at, self.num_ended = asked_at, work.num_ended

    def seconds(self, *, now: float) -> float:
        """``now``: it is gone."""
        return (self.silent_at or now) - self.busy_at


def watch_idle(url: str, gone: threading.Event) -> float:
    """For how many seconds, at most, the engine had nothing to do when it went. Waits for ``gone``; an engine that does
    not answer is slow, or on its way: only its pod's end tells."""
    idleness = LastIdleness(time.monotonic())
    while not gone.wait(_LOOK_S):
        asked_at = time.monotonic()
        idleness.hear(look(url), asked_at=asked_at, now=time.monotonic())
    return idleness.seconds(now=time.monotonic())


def look(url: str) -> Work | None:
    """What the engine has to do; None: it does not answer."""
    try:
        work = parse_work(get_text(f"{url}/metrics", timeout_s=_ASK_S))
    except (OSError, http.client.HTTPException, HttpError):
        return None
    assert work is not None, "an engine's metrics say nothing of requests"
    return work


def wait_idle(pool: Subject) -> None:
    """Every engine that is ready says that it has nothing left to do: every block came back.

    Raises:
        TimeoutError: Some hold blocks for longer than what is under way when the last client has its answer.
    """
    eventually(lambda: not busy(pool), lambda: f"engines that nobody asks hold blocks: {busy(pool)}", GIVEN_BACK_S)


def busy(pool: Subject, ask: Callable[[str], Work | None] = look) -> dict[str, str]:
    """What ready engines have to do, by name. One that does not answer may have. ``ask``: by URL."""
    ready = [pod for role in Role for pod in pool.pods(role) if is_ready(pod)]
    told = {name_of(pod): ask(url_of(pod)) for pod in ready}
    return {name: str(work or "no answer") for name, work in told.items() if work is None or not work.is_none}


def wait_begun(
    pool: Subject, role: Role, answers: int, limit_s: float, ask: Callable[[str], Work | None] = look
) -> str:
    """The name of the first engine of ``role`` that is seen with so many answers that have begun: vLLM counts a request
    of a decode engine as running from the step that gives its first token. Looks often, and does not ask the cluster in
    between, for an answer takes less than a second. ``ask``: by URL.

    Raises:
        TimeoutError: No engine is seen with so many within ``limit_s``.
    """
    engines = {name_of(pod): url_of(pod) for pod in pool.pods(role)}
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for name, url in engines.items():
            work = ask(url)
            if work is not None and work.num_running >= answers:
                return name
        time.sleep(_BEGUN_S)
    raise TimeoutError(f"no {role.value} engine was seen with {answers} answers under way within {limit_s:.0f} s")


def url_of(pod: Object) -> str:
    return f"http://{pod['status']['podIP']}:{PORT}"


def is_ready(pod: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))


def hasty(departures: list[Departure]) -> list[Departure]:
    """Those that went while they still had something to do."""
    return [one for one in departures if one.idle_s < IDLE_S]


def late(departures: list[Departure]) -> list[Departure]:
    """Those that took so long that they were not left alone."""
    return [one for one in departures if one.took_s > SOON_S]


def spans(departures: list[Departure]) -> str:
    """``went in 9 s (idle 2.5 s), 12 s (idle 3.0 s)``."""
    return "went in " + ", ".join(f"{one.took_s:.0f} s (idle {one.idle_s:.1f} s)" for one in departures)
