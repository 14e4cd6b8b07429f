"""Trouble on the side channel and in the transport, inside a real engine: what a campaign's connector wraps.

Frames are lost, doubled, held back past the next one, or late; a write is refused, reported failed although it
landed, reported failed before it lands, or stalls, so that pushes last long enough to be hit in the middle. All of it
only during a *storm*: the campaign writes until when (the machine's monotonic clock) into a file, and every engine
looks there.

Wraps methods of whole classes, because lanes make their channels themselves. Knows of them no more than
``send``, ``receive``, ``submit_writes`` and ``write_status``.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

from pdcluster_connector.transport.base import WriteStatus
from pdcluster_protocol.errors import TransferError

VARIABLE: Final = "PDCAMPAIGN_WIRE"
"""The environment variable with a ``WireSettings`` as JSON."""
_LOOK_EVERY_S: Final = 0.05
_LATE_S: Final = (0.02, 1.0)
_STALL_S: Final = (0.02, 0.4)
_BEHIND_S: Final = 0.3
"""How long a swapped frame waits for the next one."""

Frame: TypeAlias = tuple[Any, ...]
"""The arguments of one ``send``."""


class Trouble(Enum):
    """What can happen; the value is its name in settings and logs."""

    LOST = "frame lost"
    DOUBLED = "frame doubled"
    SWAPPED = "frame swapped with the next"
    LATE = "frame late"
    REFUSED = "write refused"
    CALLED_FAILED = "write landed, called failed"
    FAILED_EARLY = "write called failed before it landed"
    STALLED = "write stalled"
    RANK_REFUSED = "write of one rank refused"
    RANK_LATE = "write of one rank late"


FRAME_TROUBLE: Final = (Trouble.LOST, Trouble.DOUBLED, Trouble.SWAPPED, Trouble.LATE)
WRITE_TROUBLE: Final = (Trouble.REFUSED, Trouble.CALLED_FAILED, Trouble.FAILED_EARLY)
RANK_TROUBLE: Final = (Trouble.RANK_REFUSED, Trouble.RANK_LATE)

ODDS: Final = {
    Trouble.LOST.value: 0.08,
    Trouble.DOUBLED.value: 0.15,
    Trouble.SWAPPED.value: 0.15,
    Trouble.LATE.value: 0.15,
    Trouble.REFUSED.value: 0.006,
    Trouble.CALLED_FAILED.value: 0.006,
    Trouble.FAILED_EARLY.value: 0.02,
    Trouble.STALLED.value: 0.05,
    Trouble.RANK_REFUSED.value: 0.02,
    Trouble.RANK_LATE.value: 0.15,
}
"""For each frame, each write, and each look at a pending write. A push has 5 frames and some 30 writes."""


@dataclass(frozen=True, slots=True)
class WireSettings:
    """``who``: the engine. ``storm_file``: JSON of a ``Storm``. ``log_file`` gets one JSON line for each trouble."""

    who: str
    seed: int
    odds: dict[str, float]
    storm_file: str
    log_file: str

    def as_env(self) -> dict[str, str | None]:
        """For the engine's environment."""
        return {VARIABLE: json.dumps(asdict(self))}


@dataclass(frozen=True, slots=True)
class Storm:
    """Until when (monotonic seconds) frames are in trouble, writes fail, and writes stall.

    ``ranks_until``: until when the writes of one rank alone are, by the id of its process, in decimal.
    """

    frames_until: float = 0.0
    writes_until: float = 0.0
    stalls_until: float = 0.0
    ranks_until: Mapping[str, float] = field(default_factory=dict)

    def until(self, trouble: Trouble, pid: int) -> float:
        """When this trouble is over in process ``pid``."""
        if trouble in RANK_TROUBLE:
            return self.ranks_until.get(str(pid), 0.0)
        if trouble in FRAME_TROUBLE:
            return self.frames_until
        return self.stalls_until if trouble is Trouble.STALLED else self.writes_until

    def write(self, path: Path) -> None:
        """Engines see the whole storm or the one before."""
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.rename(path)


class Dice:
    """Says whether a trouble happens now. Several threads of one engine share it."""

    def __init__(self, settings: WireSettings) -> None:
        self._settings = settings
        self._rng = random.Random(f"wire {settings.seed} {settings.who}")
        self._storm = Storm()
        self._look_at = 0.0

    def falls(self, trouble: Trouble) -> bool:
        """Whether it happens; if so it is in the log."""
        now = time.monotonic()
        if now >= self._end_of(trouble, now) or self._rng.random() >= self._settings.odds.get(trouble.value, 0.0):
            return False
        line = {"at": now, "who": self._settings.who, "trouble": trouble.value, "pid": os.getpid()}
        with Path(self._settings.log_file).open("a") as log:
            log.write(json.dumps(line) + "\n")
        return True

    def late_s(self) -> float:
        """How long a late frame is held."""
        return self._rng.uniform(*_LATE_S)

    def stall_s(self) -> float:
        """How long a stalled write keeps its lane: as long as a busy machine may keep a thread from running."""
        return self._rng.uniform(*_STALL_S)

    def _end_of(self, trouble: Trouble, now: float) -> float:
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            path = Path(self._settings.storm_file)
            self._storm = Storm(**json.loads(path.read_text())) if path.exists() else Storm()
        return self._storm.until(trouble, os.getpid())


@dataclass(slots=True)
class HeldFrames:
    """Frames of one channel that leave later than they should. The channel's thread owns it."""

    dice: Dice
    _late: list[tuple[float, Frame]] = field(default_factory=list)
    _behind: list[tuple[float, Frame]] = field(default_factory=list)
    """Leave right after the next frame, or when their time comes."""

    def leaving(self, frame: Frame, now: float) -> list[Frame]:
        """What leaves instead of ``frame``."""
        if self.dice.falls(Trouble.LOST):
            return []
        if self.dice.falls(Trouble.LATE):
            self._late.append((now + self.dice.late_s(), frame))
            return []
        if self.dice.falls(Trouble.SWAPPED):
            self._behind.append((now + _BEHIND_S, frame))
            return []
        behind, self._behind = self._behind, []
        copies = 2 if self.dice.falls(Trouble.DOUBLED) else 1
        return [frame] * copies + [held for _, held in behind]

    def due(self, now: float) -> list[Frame]:
        """Held frames whose time has come."""
        leaving = [frame for at, frame in self._late + self._behind if at <= now]
        self._late = [(at, frame) for at, frame in self._late if at > now]
        self._behind = [(at, frame) for at, frame in self._behind if at > now]
        return leaving


def trouble_channel(kind: type[Any], dice: Dice) -> None:
    """Every channel of class ``kind`` has trouble with what it sends from now on."""
    send, receive = kind.send, kind.receive
    held: WeakKeyDictionary[Any, HeldFrames] = WeakKeyDictionary()

    def troubled_send(self: Any, *frame: Any) -> None:
        frames = held.setdefault(self, HeldFrames(dice))
        for leaving in frames.leaving(frame, time.monotonic()):
            send(self, *leaving)

    def troubled_receive(self: Any) -> Any:
        for leaving in held.setdefault(self, HeldFrames(dice)).due(time.monotonic()):
            send(self, *leaving)
        return receive(self)

    kind.send, kind.receive = troubled_send, troubled_receive


def trouble_writes(kind: type[Any], dice: Dice) -> None:
    """Every transport of class ``kind`` has trouble with its writes from now on."""
    submit_writes, write_status = kind.submit_writes, kind.write_status

    def troubled_submit(self: Any, *write: Any, **named: Any) -> Any:
        if dice.falls(Trouble.STALLED) or dice.falls(Trouble.RANK_LATE):
            time.sleep(dice.stall_s())
        if dice.falls(Trouble.REFUSED) or dice.falls(Trouble.RANK_REFUSED):
            raise TransferError("the campaign refuses this write")
        return submit_writes(self, *write, **named)

    def troubled_status(self: Any, *write: Any, **named: Any) -> Any:
        status = write_status(self, *write, **named)
        trouble = {WriteStatus.DONE: Trouble.CALLED_FAILED, WriteStatus.PENDING: Trouble.FAILED_EARLY}.get(status)
        return WriteStatus.FAILED if trouble is not None and dice.falls(trouble) else status

    kind.submit_writes, kind.write_status = troubled_submit, troubled_status


@dataclass(frozen=True, slots=True)
class Troubled:
    """One line of the log: who was in trouble, which, when (monotonic seconds), in which process."""

    at: float
    who: str
    trouble: str
    pid: int


def read_troubles(log_file: Path) -> list[Troubled]:
    """What the engines' connectors did to frames and writes so far. A line that is being written is left out."""
    if not log_file.exists():
        return []
    lines = log_file.read_text().splitlines(keepends=True)
    return [Troubled(**json.loads(line)) for line in lines if line.endswith("\n")]


def settings_from_env() -> WireSettings | None:
    """What the campaign told this engine; None outside of one."""
    text = os.environ.get(VARIABLE)
    return WireSettings(**json.loads(text)) if text else None
