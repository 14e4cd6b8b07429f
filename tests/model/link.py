"""One prefill rank's end of its connections to one decode rank, over all attempts and lives of its engine.

Does what ``worker/lane.py`` does, without its thread: adopts pushes, opens them when welcomed, submits writes
when granted, and closes its session when a push asks for a cut. The pushes are the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from model.plan import BLOCK_BYTES, DEADLINE_MS, SECRET, Plan
from pdcluster_connector.core.sending import (
    CutLane,
    Push,
    PushKey,
    PushPhase,
    Release,
    Send,
    SendingCommands,
    SumUpPush,
)
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.side_channel import (
    Again,
    Denial,
    Failed,
    Fenced,
    Grant,
    Open,
    Refusal,
    Revoke,
    Settled,
    ToPrefill,
    Unneeded,
    Welcome,
)

Output: TypeAlias = tuple[Any, ...]
"""("send", peer, message) | ("hello", peer) | ("released", key)"""


def owed_bytes(plan: Plan) -> int:
    """What each push writes: the whole of decode's block, in as many parts as prefill ranks write to it."""
    if plan.all_pairs:
        return BLOCK_BYTES
    return BLOCK_BYTES // len({p for p, d in plan.pairs if d == plan.pairs[0][1]})


@dataclass(slots=True)
class Flight:
    """A push and its writes."""

    push: Push
    is_whole: bool = False
    to_submit: int = 0
    in_flight: int = 0
    """Submitted, neither acknowledged nor cut: each may read the source, and land."""
    num_failed: int = 0
    """How many of them have ended badly."""


@dataclass(slots=True)
class Lane:
    """One connection."""

    decode_boot_id: str
    session: str = ""
    """Where its bytes go; empty until welcomed."""
    is_failed: bool = False
    is_cut: bool = False
    flights: dict[PushKey, Flight] = field(default_factory=dict)
    ended: set[PushKey] = field(default_factory=set)


@dataclass(slots=True)
class Link:
    """All connections from one prefill rank to one decode rank."""

    name: str
    life: int = 0
    num_lanes: int = 0
    lanes: dict[bytes, Lane] = field(default_factory=dict)
    kernel: set[tuple[str, PushKey]] = field(default_factory=set)
    """(session, push) of writes that nobody waits for any more and that may still land."""
    landed: dict[PushKey, int] = field(default_factory=dict)
    """Writes of each push that have landed for sure."""

    @property
    def boot_id(self) -> BootId:
        return BootId(f"{self.name.partition('.')[0]}-{self.life}")

    # What the engine does.

    def connect(self, decode_boot_id: str) -> tuple[Output, ...]:
        """A lane for new pushes: the one that works, or another."""
        if self._usable(decode_boot_id):
            return ()
        peer = f"{self.name}-{self.life}-{self.num_lanes}@{decode_boot_id}".encode()
        self.num_lanes += 1
        self.lanes[peer] = Lane(decode_boot_id)
        return (("hello", peer),)

    def _usable(self, decode_boot_id: str) -> list[bytes]:
        return [
            peer for peer, lane in self.lanes.items() if not lane.is_failed and lane.decode_boot_id == decode_boot_id
        ]

    def begin(self, plan: Plan, key: PushKey, decode_boot_id: str) -> tuple[Output, ...]:
        """A forward pass begins that computes ``key``."""
        out = list(self.connect(decode_boot_id))
        peer = self._usable(decode_boot_id)[0]
        lane = self.lanes[peer]
        push = plan.cores.push(key, hold_s=1.0, deadline=1e6)
        push.wants_sums = plan.compares
        flight = lane.flights[key] = Flight(push, to_submit=plan.writes)
        self._apply(plan, peer, flight, push.plan(owed_bytes(plan), 1, is_last=False), out)
        if lane.session:
            self._open(plan, peer, flight, out)
        return tuple(out)

    def complete(self, plan: Plan, key: PushKey) -> tuple[Output, ...]:
        """The forward pass has ended: there is no more to come."""
        out: list[Output] = []
        for peer, flight in self._flights(key):
            flight.is_whole = True
            if not flight.push.is_ended:
                self._apply(plan, peer, flight, flight.push.plan(0, 1, is_last=True), out)
            self._forget_ended(peer)
        return tuple(out)

    def give_up(self, plan: Plan, key: PushKey) -> tuple[Output, ...]:
        """Prefill ended before the prompt was computed."""
        out: list[Output] = []
        for peer, flight in self._flights(key):
            self._apply(plan, peer, flight, flight.push.give_up("", now=0.0), out)
        return tuple(out)

    def forget(self, key: PushKey) -> tuple[Output, ...]:
        """vLLM has freed the request: no order will name it again."""
        for lane in self.lanes.values():
            lane.ended.discard(key)
        return ()

    def crash(self) -> tuple[Output, ...]:
        """The process is gone; what it had submitted may still land."""
        for lane in self.lanes.values():
            self.kernel |= {(lane.session, key) for key, flight in lane.flights.items() if flight.in_flight}
        self.lanes.clear()
        self.life += 1
        return ()

    # What decode says.

    def hear(self, plan: Plan, peer: bytes, message: ToPrefill) -> tuple[Output, ...]:
        """One message on one connection; those of connections that are gone fall on the floor."""
        lane = self.lanes.get(peer)
        out: list[Output] = []
        if lane is None:
            return ()
        match message:
            case Welcome(session=session) if not lane.session and not lane.is_failed:
                lane.session = session
                for flight in list(lane.flights.values()):
                    self._open(plan, peer, flight, out)
            case Refusal():
                self._fail(plan, peer, out)
            case Revoke(transfer_id, attempt):
                self._revoked(plan, peer, PushKey(transfer_id, attempt), out)
            case Again() | Grant() | Unneeded() | Denial() | Settled():
                self._answered(plan, peer, PushKey(message.transfer_id, message.attempt), message, out)
        return tuple(out)

    def _answered(
        self,
        plan: Plan,
        peer: bytes,
        key: PushKey,
        message: Again | Grant | Unneeded | Denial | Settled,
        out: list[Output],
    ) -> None:
        lane = self.lanes[peer]
        if isinstance(message, Again):
            self._push_again(plan, peer, key, out)
        if (flight := lane.flights.get(key)) is None:
            return
        push = flight.push
        match message:
            case Grant() if lane.session and not lane.is_cut:
                self._apply(plan, peer, flight, push.grant(1.0, now=0.0), out)
                while flight.to_submit and push.may_write and not plan.is_lazy:
                    self._submit(flight)
            case Unneeded():
                self._apply(plan, peer, flight, push.unneeded(), out)
            case Denial():
                self._apply(plan, peer, flight, push.give_up("", now=0.0), out)
            case Settled():
                self._apply(plan, peer, flight, push.settled(), out)

    def _push_again(self, plan: Plan, peer: bytes, key: PushKey, out: list[Output]) -> None:
        flight = self.lanes[peer].flights.get(key)
        if flight is None or flight.push.is_ended:
            out.append(("send", peer, Failed(*key, "", is_fenced=not self.lanes[peer].is_cut)))
        elif flight.push.may_push_again:
            flight.to_submit += plan.writes
            self._apply(plan, peer, flight, flight.push.again(owed_bytes(plan), now=0.0), out)
            while flight.to_submit and flight.push.may_write and not plan.is_lazy:
                self._submit(flight)

    def _revoked(self, plan: Plan, peer: bytes, key: PushKey, out: list[Output]) -> None:
        lane = self.lanes[peer]
        if flight := lane.flights.get(key):
            self._apply(plan, peer, flight, flight.push.revoke(now=0.0), out)
        else:
            is_clean = plan.cores.answers_clean_when_gone or not lane.is_cut
            out.append(("send", peer, Fenced(*key, is_clean)))

    def _fail(self, plan: Plan, peer: bytes, out: list[Output]) -> None:
        lane = self.lanes[peer]
        lane.is_failed = True
        for flight in list(lane.flights.values()):
            self._apply(plan, peer, flight, flight.push.give_up("", now=0.0), out)

    # What the transport says.

    def submit(self, peer: bytes, key: PushKey) -> tuple[Output, ...]:
        """The next write leaves."""
        self._submit(self.lanes[peer].flights[key])
        return ()

    def acknowledged(self, plan: Plan, peer: bytes, key: PushKey) -> tuple[Output, ...]:
        """The oldest write has landed, and its acknowledgement is here."""
        out: list[Output] = []
        flight = self.lanes[peer].flights[key]
        flight.in_flight -= 1
        self.landed[key] = self.landed.get(key, 0) + 1
        self._apply(plan, peer, flight, flight.push.written(owed_bytes(plan) // plan.writes), out)
        return tuple(out)

    def write_failed(self, plan: Plan, peer: bytes, key: PushKey) -> tuple[Output, ...]:
        """A write has ended badly: it reads no more only after a cut, and may land even then."""
        out: list[Output] = []
        flight = self.lanes[peer].flights[key]
        flight.num_failed += 1
        self._apply(plan, peer, flight, flight.push.write_failed("", now=0.0), out)
        return tuple(out)

    def fire(self, plan: Plan, peer: bytes, key: PushKey, timer: str) -> tuple[Output, ...]:
        """One timer of one push has passed."""
        out: list[Output] = []
        flight = self.lanes[peer].flights[key]
        push = flight.push
        push.deadline = push._hold_until = push._renew_at = 1e6
        setattr(push, timer, 0.0)
        self._apply(plan, peer, flight, push.expire(now=1.0), out)
        return tuple(out)

    # Inside.

    def _flights(self, key: PushKey) -> list[tuple[bytes, Flight]]:
        return [(peer, lane.flights[key]) for peer, lane in self.lanes.items() if key in lane.flights]

    def _open(self, plan: Plan, peer: bytes, flight: Flight, out: list[Output]) -> None:
        key = flight.push.key
        token = SECRET.mint(*key, DEADLINE_MS)
        message = Open(*key, BootId(self.lanes[peer].decode_boot_id), DEADLINE_MS, token)
        self._apply(plan, peer, flight, flight.push.opening(message), out)

    def _submit(self, flight: Flight) -> None:
        flight.push.submitted()
        flight.to_submit -= 1
        flight.in_flight += 1

    def _apply(self, plan: Plan, peer: bytes, flight: Flight, commands: SendingCommands, out: list[Output]) -> None:
        is_cut = False
        for command in commands:
            match command:
                case Send(message):
                    out.append(("send", peer, scrubbed(message)))
                case Release():
                    out.append(("released", flight.push.key))
                case CutLane():
                    is_cut = True
                case SumUpPush():
                    self._apply(plan, peer, flight, flight.push.summed_up(plan.sums), out)
        if is_cut:
            self._cut(plan, peer, out)
        self._forget_ended(peer)

    def _cut(self, plan: Plan, peer: bytes, out: list[Output]) -> None:
        """The lane closes its own session: nothing of it reads our memory any more."""
        lane = self.lanes[peer]
        lane.is_failed = lane.is_cut = True
        for key, flight in list(lane.flights.items()):
            if flight.in_flight:
                self.kernel.add((lane.session, key))
                flight.in_flight = flight.num_failed = 0
            self._apply(plan, peer, flight, flight.push.cut("", now=0.0), out)

    def _forget_ended(self, peer: bytes) -> None:
        lane = self.lanes[peer]
        for key, flight in list(lane.flights.items()):
            is_done = flight.push.phase is PushPhase.DONE and not flight.push.is_unneeded
            # A push that ends with a write in flight is a bug: kept, so that the checks see it.
            if flight.push.is_ended and (flight.is_whole or not is_done) and not flight.in_flight:
                del lane.flights[key]
                lane.ended.add(key)


def scrubbed(message: Any) -> Any:
    """``message`` without its reason, by which nobody decides."""
    return msgspec.structs.replace(message, reason="") if hasattr(message, "reason") else message
