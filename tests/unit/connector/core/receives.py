"""One receive of two ranks, for the tests of ``receiving.py``: who asks, and what is said."""

from __future__ import annotations

from fractions import Fraction

from pdcluster_connector.core.receiving import (
    AttemptLost,
    Command,
    Commands,
    Debt,
    PeerId,
    Receive,
    ReceiveTimes,
    Reply,
    Report,
    Sender,
    SessionId,
)
from pdcluster_protocol.ids import Attempt, BootId, TransferId
from pdcluster_protocol.side_channel import Denial, Done, Fenced, Grant, Revoke

T = TransferId("t")
FIRST, SECOND = Attempt(1), Attempt(2)
A, B = PeerId(b"a"), PeerId(b"b")
"""Ranks 0 and 1 of the engine that makes the first attempt."""
C, D = PeerId(b"c"), PeerId(b"d")
"""Ranks 0 and 1 of the engine that makes the second."""
OWED = {0: 10, 1: 20}
"""Bytes of the two ranks."""
TIMES = ReceiveTimes(lease_s=9.0, quarantine_s=35.0)
FAILED = Report(is_received=False, reason="why")


def new_receive() -> Receive:
    return Receive(T, TIMES, deadline=1000.0)


def debt(rank: int) -> Debt:
    return Debt(OWED.get(rank, 0), Fraction(1, 2), Fraction(1), frozenset(OWED))


def sender(rank: int, engine: str = "p") -> Sender:
    return Sender(BootId(engine), rank, SessionId(f"session of {engine}"), debt(rank))


def grant(peer: PeerId, attempt: Attempt = FIRST) -> Reply:
    return Reply(peer, Grant(T, attempt, 9000))


def revoke(peer: PeerId, attempt: Attempt = FIRST) -> Reply:
    return Reply(peer, Revoke(T, attempt))


def done(rank: int, attempt: Attempt = FIRST) -> Done:
    return Done(T, attempt, OWED[rank], 2)


def fenced(attempt: Attempt = FIRST, *, is_clean: bool = True) -> Fenced:
    return Fenced(T, attempt, is_clean)


def granted_receive() -> Receive:
    receive = new_receive()
    assert receive.open(A, FIRST, sender(0), now=0.0) == (grant(A),)
    assert receive.open(B, FIRST, sender(1), now=0.0) == (grant(B),)
    return receive


def denial_of(commands: Commands) -> str:
    (reply,) = commands
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Denial)
    assert reply.message.transfer_id == T
    assert reply.message.attempt
    return reply.message.reason


def lost_of(commands: Commands) -> AttemptLost:
    (lost,) = (command for command in commands if isinstance(command, AttemptLost))
    return lost


def without_loss(commands: Commands) -> list[Command]:
    return [command for command in commands if not isinstance(command, AttemptLost)]
