"""One receive against the pushes of several attempts, over whatever order of events hypothesis can think of.

The network may lose, repeat and reorder messages; writes land when they like: a failed one, or one whose
sender was cut, until decode closes the session that it travels on. Held in every state:

    I1  a source is released only when no write reads it
    I2  no write lands after decode was told that its blocks are free
    I3  received only when every byte of every rank of one attempt has landed, and no older attempt can still write
    I4  exactly one report, exactly one release of each push

Content is compared: bytes may land wrong, and are then pushed once more. Held beside those four:

    no request is received with wrong content; no source is released while a second push may read it

``tests/model`` walks a smaller system with everything else in it, exhaustively.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_connector.core import receiving, sending
from pdcluster_connector.core.content import Found, plan_content
from pdcluster_connector.core.receiving import Receive, ReceiveTimes, Reply, Report
from pdcluster_connector.core.sending import Push, PushKey, Release, Send
from pdcluster_connector.core.writers import Debt, PeerId, Sender, SessionId
from pdcluster_protocol.ids import Attempt, BootId, TransferId
from pdcluster_protocol.params import ContentCheck
from pdcluster_protocol.side_channel import (
    Again,
    ContentSums,
    Denial,
    Done,
    Failed,
    Fenced,
    Grant,
    Open,
    Progress,
    RankLayout,
    RegionLayout,
    Revoke,
    Settled,
    ToDecode,
    ToPrefill,
    Unneeded,
)

T: Final = TransferId("t")
RANKS: Final = (0, 1)
ATTEMPTS: Final = (1, 2, 3)
WRITES: Final = 2
WRITE_BYTES: Final = 10
HOLD_S, DEADLINE_S = 50.0, 400.0
TIMES: Final = ReceiveTimes(lease_s=20.0, quarantine_s=30.0, ask_s=40.0)


@dataclass
class Lane:
    """One rank of one attempt: its push, its writes and both directions of its connection."""

    attempt: Attempt
    rank: int
    push: Push
    to_decode: list[ToDecode] = field(default_factory=list)
    to_prefill: list[ToPrefill] = field(default_factory=list)
    has_begun: bool = False
    to_submit: int = WRITES
    reading: int = 0
    """Writes that may still read the source: in flight, or failed and not cut here."""
    failed: int = 0
    sent: int = 0
    """Writes that were cut here, whose bytes are on their way."""
    landed: int = 0
    wrong: int = 0
    """Writes whose bytes are wrong on decode."""
    again: int = 0
    """Writes of the second push that are not acknowledged."""
    is_summing_up: bool = False
    releases: int = 0
    is_stopped: bool = False
    """SIGSTOP: what is sent goes on."""

    @property
    def peer(self) -> PeerId:
        return PeerId(b"%d.%d" % (self.attempt, self.rank))

    @property
    def session(self) -> SessionId:
        return SessionId(f"s{self.attempt}")


Event: TypeAlias = Callable[[], object]


class System:
    def __init__(self) -> None:
        self.now = 0.0
        self.receive = Receive(T, TIMES, deadline=DEADLINE_S, wants_sums=True)
        self.summing_up: Attempt | None = None
        """Decode sums up what is here of this attempt."""
        self.reports: list[Report] = []
        self.closing: list[SessionId] = []
        self.closed: set[SessionId] = set()
        self.lanes = [
            Lane(a, n, Push(PushKey(T, a), hold_s=HOLD_S, deadline=DEADLINE_S))
            for a in map(Attempt, ATTEMPTS)
            for n in RANKS
        ]
        self.start(Attempt(1))

    def events(self) -> list[Event]:
        """What may happen next, in the course of things."""
        found: list[Event] = [partial(self.wait, 1.0)]
        for lane in self.lanes:
            found += [partial(self.reach_decode, lane, index) for index in range(len(lane.to_decode))]
            if not lane.is_stopped:
                found += [partial(self.reach_prefill, lane, index) for index in range(len(lane.to_prefill))]
                found += self.events_of_writes(lane)
            if lane.sent and lane.session not in self.closed:
                found.append(partial(self.land_after_cut, lane))
        if self.closing:
            found.append(self.close_session)
        if self.summing_up is not None:
            found.append(self.compare)
        if ATTEMPTS[0] <= self.receive.lost_attempt < ATTEMPTS[-1]:
            found.append(partial(self.start, Attempt(self.receive.lost_attempt + 1)))
        return found

    def events_of_writes(self, lane: Lane) -> list[Event]:
        found: list[Event] = []
        if lane.push.may_write and lane.to_submit:
            found.append(partial(self.submit, lane))
        if lane.is_summing_up:
            found.append(partial(self.sum_up, lane))
        if lane.reading > lane.failed:
            is_open = lane.session not in self.closed
            found.append(partial(self.acknowledge if is_open else self.break_write, lane))
        return found

    def faults(self) -> list[Event]:
        """What goes wrong now and then."""
        found: list[Event] = [
            partial(self.wait, 9.0),
            partial(self.wait, 31.0),
            partial(self.start, Attempt(2)),
            partial(self.start, Attempt(3)),
            lambda: self.tell(self.receive.fail("aborted", now=self.now)),
        ]
        for lane in self.lanes:
            found.append(partial(self.stop_or_continue, lane))
            if lane.to_decode:
                found += [partial(lane.to_decode.pop, 0), partial(lane.to_decode.append, lane.to_decode[0])]
            if lane.to_prefill:
                found += [partial(lane.to_prefill.pop, 0), partial(lane.to_prefill.append, lane.to_prefill[0])]
            if lane.reading > lane.failed and not lane.is_stopped:
                found.append(partial(self.break_write, lane))
            if lane.landed and not self.reports:
                found += [partial(self.spoil, lane)] * 8
            if lane.has_begun and not lane.is_stopped:
                found.append(partial(self.give_up, lane))
        return found

    # The network.

    def reach_decode(self, lane: Lane, index: int) -> None:
        self.tell(self.hear(lane, lane.to_decode.pop(index)))

    def hear(self, lane: Lane, message: ToDecode) -> receiving.ReceivingCommands:
        receive, now = self.receive, self.now
        match message:
            case Open() if lane.session not in (*self.closing, *self.closed):
                owed = Debt(WRITES * WRITE_BYTES, Fraction(1), Fraction(len(RANKS)), frozenset(RANKS))
                sender = Sender(BootId(f"p{lane.attempt}"), lane.rank, lane.session, owed)
                return receive.open(lane.peer, lane.attempt, sender, now=now)
            case Done():
                return receive.done(lane.peer, message, now=now)
            case Failed():
                return receive.failed(lane.peer, message, now=now)
            case Fenced():
                return receive.fenced(lane.peer, message, now=now)
            case Progress():
                return receive.progress(lane.peer, message, now=now)
        return ()

    def reach_prefill(self, lane: Lane, index: int) -> None:
        match lane.to_prefill.pop(index):
            case Grant(lease_ms=lease_ms):
                self.do(lane, lane.push.grant(lease_ms / 1000, now=self.now))
            case Denial(reason=reason):
                self.do(lane, lane.push.give_up(reason, now=self.now))
            case Unneeded():
                self.do(lane, lane.push.unneeded())
            case Revoke():
                self.do(lane, lane.push.revoke(now=self.now))
            case Settled():
                self.do(lane, lane.push.settled())
            case Again() if lane.push.is_ended:
                lane.to_decode.append(Failed(T, lane.attempt, "let go", is_fenced=True))
            case Again() if lane.push.may_push_again:
                assert not lane.releases, "I1: a second push would read what was released"
                lane.to_submit, lane.again = WRITES, WRITES
                self.do(lane, lane.push.again(WRITES * WRITE_BYTES, now=self.now))

    # The transport.

    def submit(self, lane: Lane) -> None:
        lane.to_submit -= 1
        lane.reading += 1
        lane.push.submitted()

    def acknowledge(self, lane: Lane) -> None:
        lane.reading -= 1
        self.land(lane)
        lane.again = max(0, lane.again - 1)
        self.do(lane, lane.push.written(WRITE_BYTES))

    def break_write(self, lane: Lane) -> None:
        lane.failed += 1
        self.do(lane, lane.push.write_failed("broken", now=self.now))

    def land_after_cut(self, lane: Lane) -> None:
        lane.sent -= 1
        self.land(lane)

    def land(self, lane: Lane) -> None:
        lane.landed += 1
        lane.wrong = max(0, lane.wrong - 1)  # What is written again is right.
        assert not self.reports, f"I2: attempt {lane.attempt} wrote into blocks that decode had given on"

    def close_session(self) -> None:
        session = self.closing.pop(0)
        self.closed.add(session)
        self.tell(self.receive.cut(session, now=self.now))

    def spoil(self, lane: Lane) -> None:
        """Bytes of one write are not those that were pushed."""
        lane.wrong = min(WRITES, lane.wrong + 1)

    # Sums: their arithmetic is elsewhere tested; here one row stands for each rank.

    def sum_up(self, lane: Lane) -> None:
        lane.is_summing_up = False
        self.do(lane, lane.push.summed_up(sums_of({lane.rank: 1})))

    def compare(self) -> None:
        attempt, self.summing_up = self.summing_up, None
        assert attempt is not None
        here = {lane.rank: 1 + lane.wrong for lane in self.lanes if lane.attempt == attempt}
        self.tell(self.receive.summed_up(attempt, Found(PLAN, sums_of(here)), now=self.now))

    # The parties.

    def start(self, attempt: Attempt) -> None:
        for lane in self.lanes:
            if lane.attempt == attempt and not lane.has_begun:
                lane.has_begun = True
                lane.push.wants_sums = True
                self.do(lane, lane.push.opening(Open(T, attempt, BootId("d"), 1000, "token")))
                self.do(lane, lane.push.plan(WRITES * WRITE_BYTES, 2, is_last=True))

    def give_up(self, lane: Lane) -> None:
        self.do(lane, lane.push.give_up("aborted", now=self.now))

    def stop_or_continue(self, lane: Lane) -> None:
        lane.is_stopped = not lane.is_stopped

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for lane in self.lanes:
            if lane.has_begun and not lane.is_stopped:
                self.do(lane, lane.push.expire(now=self.now))
        self.tell(self.receive.expire(now=self.now))

    def do(self, lane: Lane, commands: sending.SendingCommands) -> None:
        for command in commands:
            match command:
                case Release():
                    lane.releases += 1
                    assert not lane.reading, "I1: released while a write reads the source"
                case sending.SumUpPush():
                    lane.is_summing_up = True
                case Send(message):
                    lane.to_decode.append(message)
                case sending.CutLane(reason):
                    lane.sent, lane.reading, lane.failed = lane.sent + lane.reading, 0, 0
                    self.do(lane, lane.push.cut(reason, now=self.now))

    def tell(self, commands: receiving.ReceivingCommands) -> None:
        for command in commands:
            match command:
                case Report():
                    self.reports.append(command)
                case receiving.SumUpReceive(attempt):
                    self.summing_up = attempt
                case Reply(peer, message):
                    next(lane for lane in self.lanes if lane.peer == peer).to_prefill.append(message)
                case receiving.CutSession(session) if session not in (*self.closing, *self.closed):
                    self.closing.append(session)

    # What holds in every state, and at the end.

    def check(self) -> None:
        assert len(self.reports) <= 1, "I4: reported twice"
        if self.reports and self.reports[0].is_received:
            current = [lane for lane in self.lanes if lane.attempt == self.receive.attempt]
            assert all(lane.landed >= WRITES for lane in current), "I3: received before all was there"
            assert not any(lane.wrong or lane.again for lane in current), "received with wrong content"
        for lane in self.lanes:
            said_done = any(isinstance(message, Done) for message in lane.to_decode)
            assert not said_done or lane.landed >= WRITES, "I3: done before all was there"
            assert lane.releases == lane.push.is_ended, "I1: released once, and at the end"

    def wait_for_all(self) -> None:
        """Whatever happened: time ends every wait, on both sides."""
        for lane in self.lanes:
            lane.is_stopped = False
        for _ in range(40):
            self.wait(25.0)
            while self.closing:
                self.close_session()
        assert len(self.reports) == 1, "I5: decode waits for ever"
        assert all(lane.releases for lane in self.lanes if lane.has_begun), "I5: a source is never released"


REGIONS: Final = (RegionLayout("layers.0", 0, 0, 9, 64, 64, heads=len(RANKS), page_tokens=16),)
PLAN: Final = plan_content(ContentCheck.FULL, RankLayout(0, 1, REGIONS), (((0, 16),),), "t")


def sums_of(rows: dict[int, int]) -> ContentSums:
    """One head for each prefill rank, all in one range."""
    found = np.zeros(len(RANKS), "<u8")
    for rank, number in rows.items():
        found[rank] = number
    return ContentSums(found.tobytes(), found.sum(keepdims=True).tobytes())


CHOICE_BYTES: Final = 3
"""Of one event: whether it is a fault, and which. Bytes, for to draw a list of pairs takes longer than all the rest."""


@settings(max_examples=drawn(1500), deadline=None)
@given(st.binary(min_size=30 * CHOICE_BYTES, max_size=120 * CHOICE_BYTES))
def test_late_lost_and_repeated_messages_and_writes_break_no_promise(choices: bytes) -> None:
    system = System()
    for start in range(0, len(choices) - CHOICE_BYTES + 1, CHOICE_BYTES):
        kind, *number = choices[start : start + CHOICE_BYTES]
        events = system.faults() if kind % 16 == 0 else system.events()
        events[int.from_bytes(number) % len(events)]()
        system.check()
    system.wait_for_all()
    system.check()
