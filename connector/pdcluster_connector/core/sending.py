"""One push: one prefill rank writing one attempt of one transfer into one decode rank.

Rule 1: every state and every message of a push is decided here.
Rule 2: a push is done only when every planned byte is acknowledged, and its source blocks are
        released only when no write can read them any more.

    OPENING --grant--> WRITING --last byte acknowledged--> DONE
       |                  |
       +-- denial, failed write, give_up, deadline, revoke --> STOPPING --no write in flight--> STOPPED

A failed write may still land (measured with Mooncake 0.3.13), so after one the push stays STOPPING
for ``settle_s`` and only then says ``Fenced``. After ``hold_s`` the source is released by force, so that
its blocks come back, but the push stays STOPPING and unfenced for as long as a write is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple, TypeAlias

from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.side_channel import Done, Failed, Fenced, Open, ToDecode


class PushKey(NamedTuple):
    """Names one attempt of one transfer."""

    transfer_id: TransferId
    attempt: Attempt


class Phase(Enum):
    OPENING = auto()
    WRITING = auto()
    STOPPING = auto()
    DONE = auto()
    STOPPED = auto()


ENDED: Final = frozenset({Phase.DONE, Phase.STOPPED})


@dataclass(frozen=True, slots=True)
class Send:
    """Tell the decode rank."""

    message: ToDecode


@dataclass(frozen=True, slots=True)
class Release:
    """No write reads the source blocks any more. ``is_forced``: one still may, but time is up."""

    is_forced: bool = False


Command: TypeAlias = Send | Release
Commands: TypeAlias = tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class SendTimes:
    """``settle_s``: how long a failed write may still land. ``hold_s``: how long to wait for one that never ends."""

    settle_s: float
    hold_s: float


class Push:
    """State of one push. Not thread-safe: one lane thread owns it."""

    def __init__(self, key: PushKey, times: SendTimes, *, deadline: float) -> None:
        self.key = key
        self.phase = Phase.OPENING
        self.deadline = deadline
        self.reason = ""
        self.planned_bytes = 0
        self.acked_bytes = 0
        self._times = times
        self._num_layers = 0
        self._is_whole = False
        self._in_flight = 0
        self._settled_at = 0.0
        self._hold_until = 0.0
        self._is_fence_owed = False
        self._is_released = False

    @property
    def may_write(self) -> bool:
        """Whether the next queued range may be submitted."""
        return self.phase is Phase.WRITING

    @property
    def is_waiting(self) -> bool:
        """Whether queued ranges must be kept until a grant comes."""
        return self.phase is Phase.OPENING

    @property
    def is_ended(self) -> bool:
        return self.phase in ENDED

    @property
    def is_released(self) -> bool:
        """Whether ``Release`` was said; it is said once."""
        return self._is_released or self.is_ended

    def opening(self, message: Open) -> Commands:
        """Ask for the grant. Call once, first."""
        return (Send(message),)

    def plan(self, num_bytes: int, num_layers: int, *, is_last: bool) -> Commands:
        """``num_bytes`` more in ``num_layers`` layers will be written; with ``is_last`` that is all there is."""
        assert not self._is_whole, f"{self.key}: planned after its last part"
        self.planned_bytes += num_bytes
        self._num_layers = max(self._num_layers, num_layers)
        self._is_whole = is_last
        return self._finish_if_complete()

    def grant(self) -> Commands:
        """Decode has reserved the blocks for us."""
        if self.phase is Phase.OPENING:
            self.phase = Phase.WRITING
        return self._finish_if_complete()

    def submitted(self) -> None:
        """One write was handed to the transport."""
        assert self.may_write, f"{self.key}: write while {self.phase.name}"
        self._in_flight += 1

    def written(self, num_bytes: int, *, now: float) -> Commands:
        """One write of ``num_bytes`` was acknowledged by decode's side."""
        self._in_flight -= 1
        self.acked_bytes += num_bytes
        return self._finish_if_complete() + self._stop_if_quiet(now)

    def write_failed(self, reason: str, *, now: float) -> Commands:
        """One write ended badly. It may still land within ``settle_s``."""
        self._in_flight -= 1
        self._settled_at = max(self._settled_at, now + self._times.settle_s)
        return self.give_up(reason, now=now) + self._stop_if_quiet(now)

    def give_up(self, reason: str, *, now: float) -> Commands:
        """Write no more and tell decode why. Does nothing once the push is ending."""
        if self.is_ended or self.phase is Phase.STOPPING:
            return ()
        self._enter_stopping(reason, now)
        is_fenced = self._is_quiet(now)
        self._is_fence_owed = not is_fenced
        return (Send(Failed(*self.key, reason, is_fenced)), *self._stop_if_quiet(now))

    def revoke(self, *, now: float) -> Commands:
        """Decode takes its grant back: stop, then answer ``Fenced``."""
        if self.is_ended:
            # Nothing is in flight after DONE and STOPPED, so the answer is true at once.
            return (Send(Fenced(*self.key)),)
        self._is_fence_owed = True
        if self.phase is not Phase.STOPPING:
            self._enter_stopping("decode revoked its grant", now)
        return self._stop_if_quiet(now)

    def expire(self, *, now: float) -> Commands:
        """Act on the passed deadline, on a settled failure and on a write that never ends."""
        if self.is_ended:
            return ()
        if self.phase is not Phase.STOPPING:
            is_late = now >= self.deadline
            return self.give_up("deadline passed before the last byte was acknowledged", now=now) if is_late else ()
        if stopped := self._stop_if_quiet(now):
            return stopped
        if now < self._hold_until or self._is_released:
            return ()
        self._is_released = True
        return (Release(is_forced=True),)

    def _enter_stopping(self, reason: str, now: float) -> None:
        self.phase, self.reason = Phase.STOPPING, reason
        self._hold_until = now + self._times.hold_s

    def _is_quiet(self, now: float) -> bool:
        return self._in_flight == 0 and now >= self._settled_at

    def _finish_if_complete(self) -> Commands:
        if self.phase is not Phase.WRITING or not self._is_whole or self.acked_bytes < self.planned_bytes:
            return ()
        self.phase = Phase.DONE
        return Send(Done(*self.key, self.acked_bytes, self._num_layers)), Release()

    def _stop_if_quiet(self, now: float) -> Commands:
        if self.phase is not Phase.STOPPING or not self._is_quiet(now):
            return ()
        self.phase = Phase.STOPPED
        fenced: Commands = (Send(Fenced(*self.key)),) if self._is_fence_owed else ()
        return fenced if self._is_released else (*fenced, Release())
