"""One push: one prefill rank writes one attempt of one transfer into one decode rank.

Rule 1: every state and every message of a push is decided here.
Rule 2: a push is done only when every planned byte is acknowledged, and its source blocks are
        released only when no write can read them any more.
Rule 3: a push whose content is compared says done with sums of its source. It keeps the source until decode has
        compared, so that wrong content can be pushed once more.

    OPENING --grant--> WRITING --last byte acknowledged--> DONE
       |   \\           |     \\--likewise, compared--> COMPARING --settled, give_up, deadline, cut--> DONE
       |    \\          +<----------again, once-----------+
       |     +--unneeded-----------------------------------------> DONE (decode has it all)
       +-- denial, bad write, give_up, deadline, revoke --> STOPPING --no write in flight, or cut--> STOPPED

A push is *clean* if every write that it submitted was acknowledged. A write that ended badly, or that does not end, may
still read our memory and land (measured with Mooncake 0.3.13). Such a write needs a *cut*: its session is closed, and
only then is the source released.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple, TypeAlias

from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.side_channel import ContentSums, Done, Failed, Fenced, Open, Progress, ToDecode


class PushKey(NamedTuple):
    """Names one attempt of one transfer."""

    transfer_id: TransferId
    attempt: Attempt


class PushPhase(Enum):
    OPENING = auto()
    WRITING = auto()
    COMPARING = auto()
    STOPPING = auto()
    DONE = auto()
    STOPPED = auto()


ENDED: Final = frozenset({PushPhase.DONE, PushPhase.STOPPED})
RENEWALS_PER_LEASE: Final = 3
"""Two renewals may be late or lost before decode gives the attempt up."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to the decode rank."""

    message: ToDecode


@dataclass(frozen=True, slots=True)
class Release:
    """No write reads the source blocks any more. Said once."""


@dataclass(frozen=True, slots=True)
class CutLane:
    """Close the session that our writes travel on, then call ``cut`` on every push that used it."""

    reason: str


@dataclass(frozen=True, slots=True)
class SumUpPush:
    """Every byte is acknowledged: sum up what was pushed, then call ``summed_up``. Said once."""


SendingCommand: TypeAlias = Send | Release | CutLane | SumUpPush
SendingCommands: TypeAlias = tuple[SendingCommand, ...]


class Push:
    """State of one push. Not thread-safe: one lane thread owns it."""

    def __init__(self, key: PushKey, *, hold_s: float, deadline: float) -> None:
        """``hold_s``: how long after its stop a push waits for writes in flight before it asks for a cut."""
        self.key = key
        self.phase = PushPhase.OPENING
        self.deadline = deadline
        self.reason = ""
        self.planned_bytes = 0
        self.acked_bytes = 0
        self.is_unneeded = False
        self.wants_sums = False
        """Whether ``Done`` carries sums. Set before the last part is planned."""
        self._sums: ContentSums | None = None
        self._num_pushes = 1
        self._is_summing_up = False
        self._hold_s = hold_s
        self._num_layers = 0
        self._is_whole = False
        self._in_flight = 0
        self._is_clean = True
        self._hold_until = 0.0
        self._lease_s = 0.0
        self._renew_at = 0.0
        self._is_fence_owed = False

    @property
    def may_write(self) -> bool:
        """Whether the next queued range may be submitted."""
        return self.phase is PushPhase.WRITING

    @property
    def is_waiting(self) -> bool:
        """Whether queued ranges must be kept until a grant comes."""
        return self.phase is PushPhase.OPENING

    @property
    def is_ended(self) -> bool:
        """Whether the push is over; ``Release`` was said at that moment."""
        return self.phase in ENDED

    @property
    def awaits_sums(self) -> bool:
        """Whether the source is still to be summed up. It is then needed even if no write reads it."""
        return self.wants_sums and self._sums is None and self.phase in (PushPhase.OPENING, PushPhase.WRITING)

    def opening(self, message: Open) -> SendingCommands:
        """Ask for the grant. Call once, first."""
        return (Send(message),)

    def plan(self, num_bytes: int, num_layers: int, *, is_last: bool) -> SendingCommands:
        """``num_bytes`` more in ``num_layers`` layers will be written; with ``is_last`` nothing else follows."""
        assert not self._is_whole, f"{self.key}: planned after its last part"
        self.planned_bytes += num_bytes
        self._num_layers = max(self._num_layers, num_layers)
        self._is_whole = is_last
        return self._finish_if_complete()

    def grant(self, lease_s: float, *, now: float) -> SendingCommands:
        """Decode lets us write. The grant lapses when decode hears nothing of this attempt for ``lease_s``."""
        if self.phase is PushPhase.OPENING:
            self.phase, self._lease_s = PushPhase.WRITING, lease_s
            self._renew_at = now + lease_s / RENEWALS_PER_LEASE
        return self._finish_if_complete()

    def unneeded(self) -> SendingCommands:
        """Decode has all of its KV from an earlier attempt: this push succeeds without a byte."""
        if self.phase is not PushPhase.OPENING:
            return ()
        self.phase, self.is_unneeded = PushPhase.DONE, True
        return (Release(),)

    def submitted(self) -> None:
        """One write was handed to the transport."""
        assert self.may_write, f"{self.key}: write while {self.phase.name}"
        self._in_flight += 1

    def written(self, num_bytes: int) -> SendingCommands:
        """One write of ``num_bytes`` was acknowledged by decode's side."""
        self._in_flight -= 1
        self.acked_bytes += num_bytes
        assert self.acked_bytes <= self.planned_bytes, f"{self.key}: {self.acked_bytes} of {self.planned_bytes} bytes"
        return self._finish_if_complete() + self._stop_if_quiet()

    def summed_up(self, sums: ContentSums) -> SendingCommands:
        """The source's content that was pushed has these sums."""
        self._sums = sums
        return self._finish_if_complete()

    @property
    def may_push_again(self) -> bool:
        """Whether the source is kept for a second push, which has not begun."""
        return self.phase is PushPhase.COMPARING and self._num_pushes == 1

    def again(self, num_bytes: int, *, now: float) -> SendingCommands:
        """Decode's content differs from what was pushed: ``num_bytes`` are written once more.

        Our sums stay those of the first push. If the source has changed since, decode's sums will differ again.
        """
        assert self.may_push_again, f"{self.key}: again while {self.phase.name}"
        self.phase, self._num_pushes = PushPhase.WRITING, 2
        self.planned_bytes += num_bytes
        self._renew_at = now + self._lease_s / RENEWALS_PER_LEASE
        return self._finish_if_complete()

    def refuse_again(self, reason: str) -> SendingCommands:
        """Decode wants a second push that this rank cannot make."""
        return (Send(Failed(*self.key, reason, is_fenced=True)), *self._let_go())

    def settled(self) -> SendingCommands:
        """Decode needs nothing more of us."""
        return self._let_go() if self.phase is PushPhase.COMPARING else ()

    def write_failed(self, reason: str, *, now: float) -> SendingCommands:
        """One write ended badly. Until a cut it may still read our memory, and land."""
        self._in_flight -= 1
        self._is_clean = False
        return *self.give_up(reason, now=now), CutLane(reason)

    def give_up(self, reason: str, *, now: float) -> SendingCommands:
        """Write no more and tell decode why. A push that is compared only releases its source. Does nothing once the
        push is ending."""
        if self.is_ended or self.phase is PushPhase.STOPPING:
            return ()
        if self.phase is PushPhase.COMPARING:
            return self._let_go()  # Every byte is acknowledged. A later ``Again`` will be refused.
        self._enter_stopping(reason, now)
        self._is_fence_owed = not self._is_quiet
        return (Send(Failed(*self.key, reason, is_fenced=self._is_quiet)), *self._stop_if_quiet())

    def revoke(self, *, now: float) -> SendingCommands:
        """Decode takes its grant back: stop, then answer ``Fenced``."""
        if self.is_ended:
            return (Send(Fenced(*self.key, self._is_clean)),)
        self._is_fence_owed = True
        if self.phase is not PushPhase.STOPPING:
            self._enter_stopping("decode revoked its grant", now)
        return self._stop_if_quiet()

    def cut(self, reason: str, *, now: float) -> SendingCommands:
        """The session is closed: nothing of this push reads or leaves our memory any more."""
        if self.is_ended:
            return ()
        self._is_clean = self._is_clean and self._in_flight == 0
        self._in_flight = 0
        commands = self.give_up(reason, now=now)
        return commands if self.is_ended else (*commands, *self._stop())

    def expire(self, *, now: float) -> SendingCommands:
        """Acts when the deadline has passed, when the lease is to be renewed, and when a write does not end."""
        if self.is_ended:
            return ()
        if self.phase is PushPhase.STOPPING:
            is_stuck = now >= self._hold_until and not self._is_quiet
            return (CutLane(f"a write did not end within {self._hold_s:g} s"),) if is_stuck else ()
        if now >= self.deadline:
            return self.give_up("deadline passed before the last byte was acknowledged", now=now)
        return self._renew(now)

    @property
    def _is_quiet(self) -> bool:
        """Whether every write of this push has ended well. None of them can then read our memory or land any more."""
        return self._in_flight == 0 and self._is_clean

    def _renew(self, now: float) -> SendingCommands:
        if self.phase is not PushPhase.WRITING or now < self._renew_at:
            return ()
        self._renew_at = now + self._lease_s / RENEWALS_PER_LEASE
        return (Send(Progress(*self.key, self.acked_bytes)),)

    def _enter_stopping(self, reason: str, now: float) -> None:
        self.phase, self.reason = PushPhase.STOPPING, reason
        self._hold_until = now + self._hold_s

    def _finish_if_complete(self) -> SendingCommands:
        if self.phase is not PushPhase.WRITING or not self._is_whole or self.acked_bytes < self.planned_bytes:
            return ()
        if self.wants_sums and self._sums is None:
            is_asked, self._is_summing_up = self._is_summing_up, True
            return () if is_asked else (SumUpPush(),)
        done = Send(Done(*self.key, self.acked_bytes, self._num_layers, self._sums, self._num_pushes))
        if self._sums is not None:
            self.phase = PushPhase.COMPARING
            return (done,)
        return (done, *self._let_go())

    def _let_go(self) -> SendingCommands:
        self.phase = PushPhase.DONE
        return (Release(),)

    def _stop_if_quiet(self) -> SendingCommands:
        return self._stop() if self.phase is PushPhase.STOPPING and self._is_quiet else ()

    def _stop(self) -> SendingCommands:
        self.phase = PushPhase.STOPPED
        fenced: SendingCommands = (Send(Fenced(*self.key, self._is_clean)),) if self._is_fence_owed else ()
        return (*fenced, Release())
