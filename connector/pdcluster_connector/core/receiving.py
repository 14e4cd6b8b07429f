"""One receive: one decode rank waits for its part of one prompt's KV, whichever attempt brings it.

Rule 1: a request is received only when every expected prefill rank said done, for the current attempt, with
        the byte count that decode worked out from its own block table.
        If the content is compared, the sums here must also equal the total of the ranks' sums. Content that
        differs is pushed again, once, under the same grants; if it differs again, the attempt is lost.
Rule 2: no attempt gets a grant, and vLLM is not told of a failure, while a writer of an earlier grant could
        still write: each must be done, or fenced and clean, or its session must be cut.

    WAITING --every rank done--> RECEIVED
       |  \\--failed, lease lapsed, higher attempt--> same phase, attempt lost, its writers revoked
       +-- abort, deadline, prefill failed for good --> STOPPING --no writer left--> FAILED
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from pdcluster_connector.core.content import Found, Mismatch, find_mismatch
from pdcluster_connector.core.writers import MAY_WRITE, PeerId, Sender, SessionId, Writer, WriterState
from pdcluster_protocol.ids import Attempt, BootId, TransferId
from pdcluster_protocol.side_channel import (
    Again,
    Denial,
    Done,
    Failed,
    Fenced,
    Grant,
    Progress,
    Revoke,
    Settled,
    ToPrefill,
    Unneeded,
)

_NONE: Final = Attempt(0)


class ReceivePhase(Enum):
    WAITING = auto()
    STOPPING = auto()
    RECEIVED = auto()
    FAILED = auto()


ENDED: Final = frozenset({ReceivePhase.RECEIVED, ReceivePhase.FAILED})


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this message to one prefill rank."""

    peer: PeerId
    message: ToPrefill


@dataclass(frozen=True, slots=True)
class Report:
    """Tell vLLM that the receive has ended; said exactly once. ``reason`` is empty when the KV is here."""

    is_received: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """Tell the router that this attempt will not fill the blocks; said once for an attempt."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class CutSession:
    """Close this session, then call ``cut``. A writer on it may still write, or the session is idle."""

    session: SessionId
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class SumUpReceive:
    """Every rank is done with ``attempt``: sum up the content here, then call ``summed_up``."""

    attempt: Attempt
    has_draft: bool


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The content here after ``attempt`` differs from what was pushed; a second push may follow."""

    attempt: Attempt
    reason: str


ReceivingCommand: TypeAlias = Reply | Report | AttemptLost | CutSession | SumUpReceive | Mismatched
ReceivingCommands: TypeAlias = tuple[ReceivingCommand, ...]


@dataclass(frozen=True, slots=True)
class ReceiveTimes:
    """``lease_s``: how long a silent writer keeps its grant. ``quarantine_s``: how long a revoked one has to answer.
    ``ask_s``: how long after prefill's end a rank may still ask to write."""

    lease_s: float
    quarantine_s: float
    ask_s: float


class Receive:
    """State of one receive. Not thread-safe: the receiver thread owns it. ``now``: running seconds."""

    def __init__(
        self,
        transfer_id: TransferId,
        times: ReceiveTimes,
        *,
        deadline: float,
        wants_sums: bool = False,
        may_push_again: bool = True,
    ) -> None:
        self.transfer_id = transfer_id
        self.phase = ReceivePhase.WAITING
        self.deadline = deadline
        self.reason = ""
        self.attempt = _NONE
        """The newest attempt of which this rank knows: it asked to write, gave up, or its prompt is computed."""
        self.lost_attempt = _NONE
        self._times = times
        self._wants_sums = wants_sums
        self._may_push_again = may_push_again
        self._boot_id: BootId | None = None
        self._expected: frozenset[int] = frozenset()
        """Ranks of the current attempt's engine that owe us bytes."""
        self._asking: dict[PeerId, Sender] = {}
        self._ask_by = math.inf
        """When every rank of the attempt must have asked to write."""
        self._writers: dict[PeerId, Writer] = {}

    @property
    def is_ended(self) -> bool:
        return self.phase in ENDED

    def awaited(self) -> frozenset[PeerId]:
        """The peers that wait for a grant, and those that hold one and may still write."""
        writing = (peer for peer, writer in self._writers.items() if writer.state in MAY_WRITE)
        return frozenset((*self._asking, *writing))

    def open(self, peer: PeerId, attempt: Attempt, sender: Sender, *, now: float) -> ReceivingCommands:
        """A prefill rank asks to write. It gets the grant if it owes us bytes, its engine has the same boot id as the
        attempt's other ranks, and the rank holds or awaits no grant on another connection."""
        if self.phase is ReceivePhase.RECEIVED:
            return (Reply(peer, Unneeded(self.transfer_id, attempt)),)
        if reason := self._refusal_of(peer, attempt, sender):
            return (Reply(peer, Denial(self.transfer_id, attempt, reason)),)
        revokes = self._begin(attempt, now) if attempt > self.attempt else ()
        self._boot_id, self._expected = sender.boot_id, sender.debt.writers
        self._asking[peer] = sender
        return revokes + self._grant_if_clear(now)

    def progress(self, peer: PeerId, message: Progress, *, now: float) -> ReceivingCommands:
        """A granted rank is alive."""
        writer = self._writer(peer, message.attempt)
        if writer is not None and writer.state is WriterState.WRITING:
            writer.until = now + self._times.lease_s
        return ()

    def done(self, peer: PeerId, message: Done, *, now: float) -> ReceivingCommands:
        """A granted rank says that it has written its part: none of its bytes is under way any more."""
        writer = self._writer(peer, message.attempt)
        if writer is None or writer.state not in MAY_WRITE:
            # A repeated ``Done`` gets no answer while we compare. After that the rank may let its source go.
            is_kept = message.sums is None or (writer is not None and writer.keeps_source)
            return () if is_kept else (Reply(peer, Settled(self.transfer_id, message.attempt)),)
        if message.num_pushes != writer.num_pushes:
            return ()  # Said before ``Again``: the second push may be under way.
        if writer.state is not WriterState.WRITING:
            writer.state = WriterState.FENCED
            return self._go_on(now)
        writer.state, writer.sums = WriterState.DONE, writer.sums or message.sums
        rank, expected = writer.sender.rank, writer.sender.debt.num_bytes
        if message.num_pushes == 1 and message.num_bytes != expected:
            return self._lose(f"prefill rank {rank} wrote {message.num_bytes} bytes, decode expects {expected}", now)
        return self._receive_if_complete(now)

    def summed_up(self, attempt: Attempt, found: Found, *, now: float) -> ReceivingCommands:
        """The content here has these sums. They were taken when all ranks of ``attempt`` were done."""
        if not self._is_open or attempt != self.attempt or attempt <= self.lost_attempt:
            return ()
        try:
            mismatch = find_mismatch(found, [writer.sums for writer in self._current() if writer.sums])
        except ValueError as error:
            return self._lose(f"{error}: run the same pdcluster everywhere", now)
        if mismatch is None:
            return self._received()
        mismatched = Mismatched(attempt, mismatch.reason)
        if any(writer.num_pushes == 2 for writer in self._current()):
            return mismatched, *self._lose(f"{mismatch.reason}, pushed twice", now)
        if not self._may_push_again:
            return mismatched, *self._lose(mismatch.reason, now)
        return mismatched, *self._push_again(mismatch, now)

    def failed(self, peer: PeerId, message: Failed, *, now: float) -> ReceivingCommands:
        """A prefill rank has given up; the attempt is lost."""
        if writer := self._writer(peer, message.attempt):
            self._has_stopped(writer, now, is_fenced=message.is_fenced)
        revokes = self._begin(message.attempt, now) if message.attempt > self.attempt and self._is_open else ()
        lost = self._lose(f"prefill gave up: {message.reason}", now) if message.attempt == self.attempt else ()
        return revokes + lost + self._go_on(now)

    def fenced(self, peer: PeerId, message: Fenced, *, now: float) -> ReceivingCommands:
        """A granted rank submits no more writes. If it is not clean, some of its bytes may still come."""
        writer = self._writer(peer, message.attempt)
        if writer is None or writer.state not in MAY_WRITE:
            return ()
        is_early = writer.state is WriterState.WRITING
        cut = () if message.is_clean else self._cut_off(writer)
        if message.is_clean:
            writer.state = WriterState.FENCED
        lost = self._lose("a prefill rank stopped writing before it was done", now) if is_early else ()
        return cut + lost + self._go_on(now)

    def prefill_ended(self, attempt: Attempt, *, now: float) -> ReceivingCommands:
        """The prompt of ``attempt`` is computed. Each of its ranks must ask to write within ``ask_s`` from now."""
        if not self._is_open or attempt < self.attempt or attempt <= self.lost_attempt:
            return ()
        revokes = self._begin(attempt, now) if attempt > self.attempt else ()
        self._ask_by = now + self._times.ask_s
        return revokes

    def cut(self, session: SessionId, *, now: float) -> ReceivingCommands:
        """The session is closed: no byte of its writers can land any more."""
        lost: ReceivingCommands = ()
        for writer in self._writers.values():
            if writer.sender.session == session and writer.state in MAY_WRITE:
                is_early, writer.state = writer.state is WriterState.WRITING, WriterState.FENCED
                lost += self._lose("the session of its prefill engine was cut", now) if is_early else ()
        gone = [peer for peer, sender in self._asking.items() if sender.session == session]
        self._asking = {peer: sender for peer, sender in self._asking.items() if peer not in gone}
        lost += self._lose("the session of its prefill engine was cut", now) if gone else ()
        return lost + self._go_on(now)

    def fail(self, reason: str, *, now: float) -> ReceivingCommands:
        """No attempt can succeed any more: every grant is revoked. ``Report`` follows when no writer is left."""
        if not self._is_open:
            return ()
        self.phase, self.reason = ReceivePhase.STOPPING, reason
        return self._turn_away(reason) + self._revoke_all(now) + self._go_on(now)

    def expire(self, *, now: float) -> ReceivingCommands:
        """Acts on the deadline, on lapsed leases, on the end of quarantines and on ranks that never asked to write."""
        if self._is_open and now >= self.deadline:
            return self.fail("deadline passed before the KV was here", now=now)
        late = [w for w in self._writers.values() if now >= w.until]
        cuts = sum((self._cut_off(writer) for writer in late if writer.state is WriterState.REVOKED), ())
        if silent := [writer.sender.rank for writer in late if writer.state is WriterState.WRITING]:
            return cuts + self._lose(f"prefill rank {silent[0]} said nothing for {self._times.lease_s:g} s", now)
        if now >= self._ask_by and self._is_rank_missing:
            return cuts + self._lose("prefill has ended, and not every rank of it has asked to write", now)
        return cuts

    @property
    def _is_open(self) -> bool:
        return self.phase is ReceivePhase.WAITING

    @property
    def _is_rank_missing(self) -> bool:
        """Whether some rank of the current attempt has not asked to write."""
        asked = {sender.rank for sender in (*(w.sender for w in self._current()), *self._asking.values())}
        return not self._expected or asked != self._expected

    def _writer(self, peer: PeerId, attempt: Attempt) -> Writer | None:
        writer = self._writers.get(peer)
        return writer if writer is not None and writer.attempt == attempt else None

    def _refusal_of(self, peer: PeerId, attempt: Attempt, sender: Sender) -> str:
        if not self._is_open:
            return f"the request has ended on decode: {self.reason}"
        if attempt < self.attempt or attempt <= self.lost_attempt:
            return f"attempt {attempt} is over on decode, the newest is {self.attempt}: {self.reason}"
        if attempt == self.attempt and self._boot_id not in (None, sender.boot_id):
            return "another prefill engine holds the grant of this attempt"
        if sender.rank not in sender.debt.writers:
            return f"prefill rank {sender.rank} holds no KV of this decode rank"
        if self._is_taken(peer, attempt, sender.rank):
            return f"prefill rank {sender.rank} holds the grant on another connection"
        return ""

    def _is_taken(self, peer: PeerId, attempt: Attempt, rank: int) -> bool:
        granted = (p for p, w in self._writers.items() if w.attempt == attempt and w.sender.rank == rank)
        asking = (p for p, sender in self._asking.items() if attempt == self.attempt and sender.rank == rank)
        return any(other != peer for other in (*granted, *asking))

    def _begin(self, attempt: Attempt, now: float) -> ReceivingCommands:
        """A newer attempt is here: ranks that hold a grant of an older attempt must stop."""
        turned_away = self._turn_away(f"attempt {attempt} has begun")
        self.attempt, self._boot_id, self._expected, self._ask_by = attempt, None, frozenset(), math.inf
        return turned_away + self._revoke_all(now)

    def _grant_if_clear(self, now: float) -> ReceivingCommands:
        if any(w.attempt != self.attempt and w.state in MAY_WRITE for w in self._writers.values()):
            return ()
        asking, self._asking = self._asking, {}
        for peer, sender in asking.items():
            held = self._writer(peer, self.attempt)
            self._writers[peer] = held or Writer(self.attempt, sender, until=now + self._times.lease_s)
        grant = Grant(self.transfer_id, self.attempt, int(self._times.lease_s * 1000))
        return tuple(Reply(peer, grant) for peer in asking)

    def _has_stopped(self, writer: Writer, now: float, *, is_fenced: bool) -> None:
        if writer.state not in MAY_WRITE:
            return
        if is_fenced:
            writer.state = WriterState.FENCED
        elif writer.state is WriterState.WRITING:
            # The rank will send ``Fenced`` unasked.
            writer.state, writer.until = WriterState.REVOKED, now + self._times.quarantine_s

    def _cut_off(self, writer: Writer) -> ReceivingCommands:
        if writer.state is WriterState.CUTTING:
            return ()
        writer.state = WriterState.CUTTING
        return (CutSession(writer.sender.session),)

    def _lose(self, reason: str, now: float) -> ReceivingCommands:
        if not self._is_open or self.lost_attempt >= self.attempt:
            return ()
        self.lost_attempt, self.reason = self.attempt, reason
        return (*self._turn_away(reason), *self._revoke_all(now), AttemptLost(self.attempt, reason))

    def _turn_away(self, reason: str) -> ReceivingCommands:
        """The peers that wait for their grant of the current attempt are denied it."""
        asking, self._asking = self._asking, {}
        return tuple(Reply(peer, Denial(self.transfer_id, self.attempt, reason)) for peer in asking)

    def _revoke_all(self, now: float) -> ReceivingCommands:
        revokes: ReceivingCommands = ()
        for peer, writer in self._writers.items():
            if writer.state is WriterState.WRITING:
                writer.state, writer.until = WriterState.REVOKED, now + self._times.quarantine_s
                revokes += (Reply(peer, Revoke(self.transfer_id, writer.attempt)),)
        return revokes + self._settle_all()

    def _receive_if_complete(self, now: float) -> ReceivingCommands:
        done = [(w.sender.rank, w.sender.debt) for w in self._current() if w.state is WriterState.DONE]
        if {rank for rank, _ in done} != self._expected:
            return ()
        covered, (_, debt) = sum(debt.coverage for _, debt in done), done[0]
        if covered != debt.needed:
            return self._lose(f"prefill has KV of {covered} heads and layers, decode needs {debt.needed}", now)
        if not self._wants_sums:
            return self._received()
        if silent := [writer.sender.rank for writer in self._current() if writer.sums is None]:
            return self._lose(f"prefill rank {silent[0]} sent no sums: run the same pdcluster everywhere", now)
        return (SumUpReceive(self.attempt, debt.has_draft),)

    def _push_again(self, mismatch: Mismatch, now: float) -> ReceivingCommands:
        """Each rank pushes its part of the mismatch again, under the grant that it holds."""
        again = Again(self.transfer_id, self.attempt, mismatch.regions, mismatch.ranges)
        peers = [peer for peer, writer in self._writers.items() if writer.attempt == self.attempt]
        for peer in peers:
            writer = self._writers[peer]
            writer.state, writer.num_pushes, writer.until = WriterState.WRITING, 2, now + self._times.lease_s
        return tuple(Reply(peer, again) for peer in peers)

    def _settle_all(self) -> ReceivingCommands:
        """The ranks that are done and keep their source may let it go."""
        kept = {peer: writer for peer, writer in self._writers.items() if writer.keeps_source}
        for writer in kept.values():
            writer.state = WriterState.FENCED
        return tuple(Reply(peer, Settled(self.transfer_id, writer.attempt)) for peer, writer in kept.items())

    def _received(self) -> ReceivingCommands:
        self.phase = ReceivePhase.RECEIVED
        return (Report(is_received=True), *self._settle_all())

    def _current(self) -> list[Writer]:
        return [writer for writer in self._writers.values() if writer.attempt == self.attempt]

    def _go_on(self, now: float) -> ReceivingCommands:
        """A writer has stopped. If no other is left to wait for, grant the ranks that ask, or report the failure."""
        if self._is_open:
            return self._grant_if_clear(now) if self._asking else ()
        if self.phase is not ReceivePhase.STOPPING or any(w.state in MAY_WRITE for w in self._writers.values()):
            return ()
        self.phase = ReceivePhase.FAILED
        return (Report(is_received=False, reason=self.reason),)
