"""Decides when each process of a router begins and ends: ``--processes``.

    places 0..N-1, each with a client socket that the keeper holds open for good

    STARTING --ready--> SERVING --renewed--> LEAVING (takes no new connections, answers those it has) --> ended
        |                  |
        +---- ended -------+--> started again at the same place, later each time; ``MAX_FAILURES`` in a row end all

Each process has a seat: the number of its column in the shared loads. A seat is given again when its process has ended.
A successor starts beside its predecessor, so no place is ever empty when processes are renewed. A process that answers
says so again and again. One that is silent for long is killed. Knows no process, no signal and no clock: it is told
what has happened, and returns commands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, TypeAlias

MAX_FAILURES: Final = 5
"""So many ends in a row at one place, each soon after its start, and the router ends: an orchestrator sees that it
fails, and clients' connections are not left waiting at a place without a process."""
STEADY_S: Final = 10.0
"""Seconds of service after which an end counts as the first one again."""
FIRST_WAIT_S: Final = 0.1
"""Seconds until a process that has ended is started again. Doubled each time."""
START_LIMIT_S: Final = 60.0
"""Seconds until a process must be ready. Its first look at the pool takes five at most, imports one or two."""
SEATS_PER_PLACE: Final = 4
"""One that serves, one that starts, and two that leave. Further renewals wait until one has left."""
END_GRACE_S: Final = 10.0
"""Seconds that a process gets to end after its requests have had their time."""
MAX_SILENT_LOOKS: Final = 30
"""A process that is silent for more looks in a row, one each second, is killed. Looks are counted and not seconds:
after a pause of the whole machine the process has not spoken either, and is well."""


class LifePhase(Enum):
    """The phase of a process's life."""

    STARTING = auto()
    SERVING = auto()
    LEAVING = auto()


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start a process for ``place`` with ``seat``."""

    place: int
    seat: int


@dataclass(frozen=True, slots=True)
class LetLeave:
    """The process with ``seat`` shall take no new connections, and end when it has none left."""

    seat: int


@dataclass(frozen=True, slots=True)
class StopProcess:
    """The process with ``seat`` shall drain now. Told once."""

    seat: int


@dataclass(frozen=True, slots=True)
class HurryProcess:
    """The process with ``seat`` drains, and shall not wait for its requests any longer."""

    seat: int


@dataclass(frozen=True, slots=True)
class KillProcess:
    """The process with ``seat`` is silent, or has not done in time as it was told."""

    seat: int


@dataclass(frozen=True, slots=True)
class RenewalEnded:
    """No further process is replaced. ``num_old``: places whose process is still an old one, since its successor has
    failed."""

    num_old: int


@dataclass(frozen=True, slots=True)
class EndRouter:
    """All processes have ended; the router ends with ``status``."""

    status: int


ProcessCommand: TypeAlias = (
    StartProcess | LetLeave | StopProcess | HurryProcess | KillProcess | RenewalEnded | EndRouter
)


@dataclass(slots=True)
class _Process:
    place: int
    seat: int
    phase: LifePhase
    started_at: float
    since: float
    """When it was started, or became ready."""
    replaces: int | None = None
    """The seat of its predecessor, which serves until it is ready."""
    is_killed: bool = False
    num_silent_looks: int = 0


@dataclass(slots=True)
class _PlaceState:
    number: int
    num_failures: int = 0
    start_at: float | None = None
    """When its next process starts; None: it has one."""


@dataclass(slots=True)
class Succession:
    """The processes of one router. One owner, who carries out all commands."""

    num_places: int
    _places: list[_PlaceState] = field(init=False)
    _by_seat: dict[int, _Process] = field(init=False, default_factory=dict)
    _renewed_at: float | None = field(init=False, default=None)
    """All processes that were started before are to be replaced. None: none is."""
    _status: int | None = field(init=False, default=None)
    """The status to end with; None: it goes on."""
    _kill_at: float | None = field(init=False, default=None)
    _has_begun: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._places = [_PlaceState(number) for number in range(self.num_places)]

    @property
    def is_ending(self) -> bool:
        return self._status is not None

    def begin(self, *, now: float) -> list[ProcessCommand]:
        """The first commands."""
        return [self._start(place.number, now=now) for place in self._places]

    def ready(self, seat: int, *, now: float) -> list[ProcessCommand]:
        """The process answers. Told once for each, and not after its end."""
        process = self._by_seat[seat]
        process.phase, process.since = LifePhase.SERVING, now
        if self.is_ending:
            return []
        commands: list[ProcessCommand] = []
        if process.replaces in self._by_seat:
            self._by_seat[process.replaces].phase = LifePhase.LEAVING
            commands = [LetLeave(process.replaces)]
        process.replaces = None
        self._has_begun = self._has_begun or all(self._is_served(one.number) for one in self._places)
        return [*commands, *self._renew_next(now=now)]

    def heard(self, seat: int) -> None:
        """The process has said that it goes on."""
        self._by_seat[seat].num_silent_looks = 0

    def look(self) -> list[ProcessCommand]:
        """A second has passed: processes that have been silent for too long are killed."""
        found = [one for one in self._by_seat.values() if one.phase is not LifePhase.STARTING]
        for process in found:
            process.num_silent_looks += 1
        silent = [one for one in found if one.num_silent_looks > MAX_SILENT_LOOKS and not one.is_killed]
        return [self._kill(process) for process in silent]

    def ended(self, seat: int, status: int, *, now: float, drain_s: float = 0.0) -> list[ProcessCommand]:
        """The process has ended by itself, or as it was told. ``status``: its exit status, or a signal's number.
        ``drain_s``: how long the others may drain, if the router has to end."""
        process = self._by_seat.pop(seat)
        if self.is_ending:
            return self._exit_when_empty()
        if process.phase is LifePhase.LEAVING:
            return self._renew_next(now=now)
        if process.replaces in self._by_seat:  # The predecessor goes on, and no other place is tried.
            return self._give_up_renewal()
        if not self._has_begun:
            return self._end(status or 1, now=now, within_s=drain_s)
        return [*self._failed(process, now=now, drain_s=drain_s), *self._renew_next(now=now)]

    def renew(self, *, now: float) -> list[ProcessCommand]:
        """Each process that was started before now is replaced, one after another."""
        if self.is_ending:
            return []
        self._renewed_at = now
        return self._renew_next(now=now)

    def stop(self, *, now: float, drain_s: float) -> list[ProcessCommand]:
        """All processes drain, for ``drain_s`` seconds at most. A second time: none waits any longer."""
        if not self.is_ending:
            return self._end(0, now=now, within_s=drain_s)
        self._kill_at = now + END_GRACE_S if self._kill_at is None else min(self._kill_at, now + END_GRACE_S)
        return [HurryProcess(seat) for seat in self._by_seat]

    def tick(self, *, now: float) -> list[ProcessCommand]:
        """Commands whose time has come."""
        if self._kill_at is not None:
            return self._kill_all() if now >= self._kill_at else []
        kills = [self._kill(one) for one in list(self._by_seat.values()) if self._is_late(one, now)]
        due = [place for place in self._places if place.start_at is not None and now >= place.start_at]
        return [*kills, *(self._start(place.number, now=now) for place in due)]

    def next_at(self) -> float | None:
        """When ``tick`` is to be called, as ``now``; None: nothing is waited for."""
        if self._kill_at is not None:
            return self._kill_at
        starts = [place.start_at for place in self._places if place.start_at is not None]
        starting = [one for one in self._by_seat.values() if one.phase is LifePhase.STARTING and not one.is_killed]
        return min([*starts, *(one.since + START_LIMIT_S for one in starting)], default=None)

    def _start(self, place: int, *, now: float, replaces: int | None = None) -> StartProcess:
        self._places[place].start_at = None
        seat = self._free_seat()
        self._by_seat[seat] = _Process(place, seat, LifePhase.STARTING, now, now, replaces)
        return StartProcess(place, seat)

    def _free_seat(self) -> int:
        return next(seat for seat in range(self.num_places * SEATS_PER_PLACE) if seat not in self._by_seat)

    def _renew_next(self, *, now: float) -> list[ProcessCommand]:
        """Starts the next successor, if none starts already and a seat is free for it and for each crash."""
        if self._renewed_at is None or not self._has_begun or self._successor() is not None:
            return []
        old = self._old(self._renewed_at)
        if not old and not any(place.start_at is not None for place in self._places):
            self._renewed_at = None
            return [RenewalEnded(0)]
        ready = [one for one in old if one.phase is LifePhase.SERVING]
        if not ready or len(self._by_seat) >= self.num_places * (SEATS_PER_PLACE - 1):
            return []
        return [self._start(ready[0].place, now=now, replaces=ready[0].seat)]

    def _give_up_renewal(self) -> list[ProcessCommand]:
        renewed_at, self._renewed_at = self._renewed_at, None
        return [] if renewed_at is None else [RenewalEnded(len(self._old(renewed_at)))]

    def _old(self, renewed_at: float) -> list[_Process]:
        """The processes that stay and were started before, in the order of their places."""
        staying = [one for one in self._by_seat.values() if one.phase is not LifePhase.LEAVING and one.replaces is None]
        return sorted((one for one in staying if one.started_at < renewed_at), key=lambda one: one.place)

    def _successor(self) -> _Process | None:
        """The process that starts beside its predecessor."""
        starting = (one for one in self._by_seat.values() if one.phase is LifePhase.STARTING)
        return next((one for one in starting if one.replaces is not None), None)

    def _is_served(self, place: int) -> bool:
        return any(one.place == place and one.phase is LifePhase.SERVING for one in self._by_seat.values())

    def _failed(self, process: _Process, *, now: float, drain_s: float) -> list[ProcessCommand]:
        place = self._places[process.place]
        successor = self._successor()
        if successor is not None and successor.replaces == process.seat:
            successor.replaces = None  # It becomes the only one there.
            return []
        was_steady = process.phase is LifePhase.SERVING and now - process.since >= STEADY_S
        place.num_failures = 1 if was_steady else place.num_failures + 1
        if place.num_failures >= MAX_FAILURES:
            return self._end(1, now=now, within_s=drain_s)
        place.start_at = now + FIRST_WAIT_S * 2 ** (place.num_failures - 1)
        return []

    def _end(self, status: int, *, now: float, within_s: float) -> list[ProcessCommand]:
        self._status, self._renewed_at = status, None
        self._kill_at = now + within_s + END_GRACE_S
        return [*(StopProcess(seat) for seat in self._by_seat), *self._exit_when_empty()]

    def _exit_when_empty(self) -> list[ProcessCommand]:
        assert self._status is not None
        return [] if self._by_seat else [EndRouter(self._status)]

    def _kill(self, process: _Process) -> KillProcess:
        process.is_killed = True
        return KillProcess(process.seat)

    def _kill_all(self) -> list[ProcessCommand]:
        self._kill_at = None if not self._by_seat else (self._kill_at or 0.0) + END_GRACE_S
        return [KillProcess(seat) for seat in self._by_seat]

    def _is_late(self, process: _Process, now: float) -> bool:
        is_due = process.phase is LifePhase.STARTING and now >= process.since + START_LIMIT_S
        return is_due and not process.is_killed
