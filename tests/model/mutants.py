"""One deliberate bug in each core. The walk must find every one of them: ``test_walk.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from model.plan import Cores, Faults, Plan
from pdcluster_connector.core import reception
from pdcluster_connector.core.content import Found
from pdcluster_connector.core.receiving import Receive, ReceivePhase, ReceivingCommands, Report
from pdcluster_connector.core.reception import Ended, Reception, ReceptionCommand
from pdcluster_connector.core.sending import CutLane, Push, PushPhase, Release, SendingCommands
from pdcluster_connector.core.source_hold import SourceHolds
from pdcluster_connector.core.writers import MAY_WRITE, PeerId, SessionId, WriterState
from pdcluster_connector.scheduler.decode import DecodeScheduler
from pdcluster_protocol.ids import Attempt, RequestId, TransferId
from pdcluster_protocol.side_channel import ContentSums, Done, Fenced
from pdcluster_router.core.requests.pairing import Command as RouterCommand
from pdcluster_router.core.requests.pairing import Event, Pairing


@dataclass(frozen=True)
class Mutant:
    """A bug, the smallest plan in which it shows, and the promise that it breaks."""

    name: str
    invariant: str
    plan: Plan
    receive: type[Receive] = Receive


@contextmanager
def receiving_by(receive: type[Receive]) -> Iterator[None]:
    """Receptions make their receives with ``receive``."""
    known: Any = reception
    before, known.Receive = known.Receive, receive
    try:
        yield
    finally:
        known.Receive = before


class GrantsAtOnce(Receive):
    """Grants a newer attempt while writers of the older one may still write."""

    def _grant_if_clear(self, now: float) -> ReceivingCommands:
        hidden = {p: w for p, w in self._writers.items() if w.attempt != self.attempt and w.state in MAY_WRITE}
        for peer in hidden:
            del self._writers[peer]
        commands = super()._grant_if_clear(now)
        self._writers = {**hidden, **self._writers}
        return commands


class BelievesUnclean(Receive):
    """Takes an unclean fence for a fence."""

    def fenced(self, peer: PeerId, message: Fenced, *, now: float) -> ReceivingCommands:
        return super().fenced(peer, Fenced(message.transfer_id, message.attempt, is_clean=True), now=now)


class FencesByTime(Receive):
    """Takes the end of the quarantine for a fence, as issue 3 did."""

    def expire(self, *, now: float) -> ReceivingCommands:
        for writer in self._writers.values():
            if writer.state is WriterState.REVOKED and now >= writer.until:
                writer.state = WriterState.FENCED
        return super().expire(now=now) + self._go_on(now)


class ForgetsToRevoke(Receive):
    """Fails without asking the writers to stop, and without waiting for them."""

    def _revoke_all(self, now: float) -> ReceivingCommands:
        for writer in self._writers.values():
            if writer.state is WriterState.WRITING:
                writer.state = WriterState.FENCED
        return ()


class BelievesOldDone(Receive):
    """Counts done of an older attempt for the current one."""

    def done(self, peer: PeerId, message: Done, *, now: float) -> ReceivingCommands:
        writer = self._writers.get(peer)
        if writer is not None and writer.state is WriterState.REVOKED and self._expected:
            writer.state = WriterState.WRITING
        return super().done(peer, message, now=now)

    def _current(self) -> list[Any]:
        return list(self._writers.values())


class CountsNoRanks(Receive):
    """Is content with the first rank that is done."""

    def _receive_if_complete(self, now: float) -> ReceivingCommands:
        self.phase = ReceivePhase.RECEIVED
        return (Report(is_received=True),)


class NeverExpires(Receive):
    """Has no deadline, lease or quarantine."""

    def expire(self, *, now: float) -> ReceivingCommands:
        return ()


class CutsNothing(Receive):
    """Does not notice that a session was cut."""

    def cut(self, session: SessionId, *, now: float) -> ReceivingCommands:
        return ()


class ReportsTwice(Reception):
    """Names each request that has ended a second time."""

    def _commands(self, transfer: TransferId, commands: ReceivingCommands, now: float) -> Iterator[ReceptionCommand]:
        for command in super()._commands(transfer, commands, now):
            yield command
            if isinstance(command, Ended):
                yield command


class ReleasesBeforeCut(Push):
    """Releases its source when a write has failed, before the session is cut."""

    def write_failed(self, reason: str, *, now: float) -> SendingCommands:
        commands = super().write_failed(reason, now=now)
        return *(command for command in commands if not isinstance(command, CutLane)), Release()


class SaysDoneEarly(Push):
    """Says done when all is submitted, not when all is acknowledged."""

    def submitted(self) -> None:
        super().submitted()
        self.acked_bytes = self.planned_bytes

    def written(self, num_bytes: int) -> SendingCommands:
        return super().written(0)


class NeverAsksForCut(Push):
    """Waits for ever for a write that does not end."""

    def write_failed(self, reason: str, *, now: float) -> SendingCommands:
        return tuple(c for c in super().write_failed(reason, now=now) if not isinstance(c, CutLane))

    def expire(self, *, now: float) -> SendingCommands:
        return tuple(command for command in super().expire(now=now) if not isinstance(command, CutLane))


class FencesCleanAfterCut(Push):
    """Forgets at a cut that its writes were not acknowledged."""

    def cut(self, reason: str, *, now: float) -> SendingCommands:
        self._in_flight, self._is_clean = 0, True
        return super().cut(reason, now=now)


class AnswersRevokeAtOnce(Push):
    """Answers a revoke before its writes have ended."""

    def revoke(self, *, now: float) -> SendingCommands:
        self._in_flight = 0
        return super().revoke(now=now)


class FreesForOneReader(SourceHolds[int]):
    """Frees the source when the first of its readers has released it."""

    def released(self, request_id: RequestId, reader: int) -> None:
        for known in self.readers(request_id):
            super().released(request_id, known)


class FreesUnread(SourceHolds[int]):
    """Frees the source when vLLM has ended the request, whoever reads it."""

    def take_free(self) -> set[RequestId]:
        for request_id, hold in self._holds.items():
            for reader in list(hold.readers) if hold.is_finished else []:
                self.released(request_id, reader)
        return super().take_free()


class NeverFrees(SourceHolds[int]):
    """Forgets who has released what before vLLM ended the request."""

    def released(self, request_id: RequestId, reader: int) -> None:
        if (hold := self._holds.get(request_id)) and hold.is_finished:
            super().released(request_id, reader)


class AsksNoMore(DecodeScheduler):
    """Does not tell the router of a lost attempt."""

    def attempt_lost(self, request_id: RequestId, attempt: Attempt, reason: str, *, now: float) -> None:
        return


class ForgetsWhich(DecodeScheduler):
    """Tells the router of a lost attempt, but not which."""

    def attempt_lost(self, request_id: RequestId, attempt: Attempt, reason: str, *, now: float) -> None:
        super().attempt_lost(request_id, attempt, reason, now=now)
        self._posts = [
            (request, url, msgspec.structs.replace(reservation, lost_attempt=Attempt(0)), deadline)
            for request, url, reservation, deadline in self._posts
        ]


class SameAttempt(Pairing):
    """Tries again without a higher attempt."""

    __slots__ = ()

    def handle(self, event: Event, *, now: float) -> tuple[RouterCommand, ...]:
        before = self.attempt
        commands = super().handle(event, now=now)
        self.attempt = before
        return commands


class GivesUpSilently(Pairing):
    """Starts no other attempt, and tells nobody."""

    __slots__ = ()

    def handle(self, event: Event, *, now: float) -> tuple[RouterCommand, ...]:
        return () if event is Event.PREFILL_FAILED else super().handle(event, now=now)


class ReceivesWhatDiffers(Receive):
    """Receives whatever the sums say."""

    def summed_up(self, attempt: Attempt, found: Found, *, now: float) -> ReceivingCommands:
        return self._received() if super().summed_up(attempt, found, now=now) else ()


class NeverSettles(Receive):
    """Tells nobody that no second push is wanted."""

    def _settle_all(self) -> ReceivingCommands:
        return ()


class ReleasesAtDone(Push):
    """Releases its source when it has said done, though it may be asked again."""

    def summed_up(self, sums: ContentSums) -> SendingCommands:
        commands = super().summed_up(sums)
        return (*commands, Release()) if self.phase is PushPhase.COMPARING else commands


_WRITE: Final = Faults(write=1)
_LATE: Final = Faults(early=1)
_FAILS: Final = Faults(prefill_fails=1)
_LATE_WRITE: Final = Faults(write=1, early=1)


def _plan(
    name: str,
    faults: Faults,
    *,
    ranks: tuple[int, int] = (1, 1),
    must_receive: bool = False,
    **cores: Any,
) -> Plan:
    return Plan(name, *ranks, faults=faults, must_receive=must_receive, cores=Cores(**cores))


MUTANTS: Final = (
    Mutant("grants at once", "I2", _plan("receive", _LATE), GrantsAtOnce),
    Mutant("believes unclean fences", "I2", _plan("receive", _WRITE), BelievesUnclean),
    Mutant("fences by time", "I2", _plan("receive", Faults(early=2)), FencesByTime),
    Mutant("forgets to revoke", "I2", _plan("receive", Faults(cancel=1)), ForgetsToRevoke),
    Mutant("believes an old done", "I3", _plan("receive", Faults(early=1, repeat=1), ranks=(2, 1)), BelievesOldDone),
    Mutant("counts no ranks", "I3", _plan("receive", Faults(), ranks=(2, 1)), CountsNoRanks),
    Mutant("never expires", "I5", _plan("receive", Faults(lose=1)), NeverExpires),
    Mutant("does not notice cuts", "I5", _plan("receive", _WRITE), CutsNothing),
    Mutant("reports twice", "I4", _plan("reception", Faults(), reception=ReportsTwice)),
    Mutant("releases before the cut", "I1", _plan("push", _WRITE, push=ReleasesBeforeCut)),
    Mutant("says done early", "I1", _plan("push", Faults(), push=SaysDoneEarly)),
    Mutant("never asks for a cut", "I5", _plan("push", _WRITE, push=NeverAsksForCut)),
    Mutant("fences clean after a cut", "I2", _plan("push", _LATE_WRITE, push=FencesCleanAfterCut)),
    Mutant("answers a revoke at once", "I1", _plan("push", _LATE, push=AnswersRevokeAtOnce)),
    Mutant("frees for one reader", "I1", _plan("holds", Faults(), ranks=(1, 2), holds=FreesForOneReader)),
    Mutant("frees what is read", "I1", _plan("holds", Faults(), holds=FreesUnread)),
    Mutant("never frees", "I5", _plan("holds", _LATE, holds=NeverFrees)),
    Mutant("asks no more", "I5", _plan("scheduler", _WRITE, must_receive=True, scheduler=AsksNoMore)),
    Mutant("forgets which attempt", "I5", _plan("scheduler", _WRITE, must_receive=True, scheduler=ForgetsWhich)),
    Mutant("same attempt again", "I5", _plan("pairing", _FAILS, must_receive=True, pairing=SameAttempt)),
    Mutant("gives up silently", "I5", _plan("pairing", _FAILS, must_receive=True, pairing=GivesUpSilently)),
    Mutant("receives what differs", "I3", Plan("compared", compares=True, faults=Faults(spoil=1)), ReceivesWhatDiffers),
    Mutant("never settles", "I5", Plan("compared", compares=True, is_prompt=True), NeverSettles),
    Mutant(
        "releases at done",
        "I1",
        Plan("compared", compares=True, faults=Faults(spoil=1), cores=Cores(push=ReleasesAtDone)),
    ),
    Mutant(
        "the lane forgets its cut",
        "I2",
        _plan("lane", Faults(write=1, lose=2, early=1), answers_clean_when_gone=True),
    ),
)
