"""How a lane ends what it began: what it says after a cut, and what it does not say of blocks that were taken away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TypeVar

import msgspec
import numpy as np

from fakes.transports import Failing, Unseen, Wrapped, wrap_transports
from integration.ranks import LIFE, SECRET, Cache, Pair, Shape, fingerprint_of, make_pair, prefill_rank, push_slice
from patience import EDGE_S, PATIENCE_S, until
from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.core.writers import PeerId
from pdcluster_connector.reshard.feeds import ReshardItem
from pdcluster_connector.reshard.resharder import ReshardFailed
from pdcluster_connector.reshard.rounds import StagedPart
from pdcluster_connector.reshard.staging import StagingBuffer
from pdcluster_connector.settings import Settings
from pdcluster_connector.side_channel import DecodeChannel, Wakeup
from pdcluster_connector.steps import PrefillStep, PushSlice
from pdcluster_connector.transport.base import Transport, WriteId, WriteRange, WriteStatus
from pdcluster_connector.worker.orders import Order, Quiesce, Staged, StagedWrite
from pdcluster_connector.worker.prefill import UNUSED_S, PrefillWorker
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.params import SideChannelAddress
from pdcluster_protocol.side_channel import (
    Denial,
    Failed,
    Fenced,
    Grant,
    Hello,
    Open,
    Progress,
    Revoke,
    ToDecode,
    Welcome,
)

M = TypeVar("M", bound=ToDecode)
T, FIRST, BOOT = TransferId("t"), Attempt(1), BootId("decode by hand")


class DecodeByHand:
    """A decode rank of which the test plays every word."""

    def __init__(self, shape: Shape) -> None:
        self.cache = Cache(shape)
        self.channel = DecodeChannel("127.0.0.1", 0, BOOT, SECRET, Wakeup())
        self.address = SideChannelAddress("127.0.0.1", self.channel.port, BOOT)
        self.peer = PeerId(b"")

    def hear(self, kind: type[M]) -> M:
        """The next message of this kind."""
        deadline = time.monotonic() + EDGE_S
        while time.monotonic() < deadline:
            self.channel.wait(0.1)
            while (received := self.channel.receive()) is not None:
                self.peer = received.peer
                if isinstance(received.message, kind):
                    return received.message
        raise AssertionError(f"no {kind.__name__} came")


def slice_for(address: SideChannelAddress) -> PushSlice:
    return msgspec.structs.replace(push_slice(T, address, [1], [2], deadline_ms=20_000), request_id=RequestId("r"))


@contextmanager
def granted_push(wrap: Callable[[Transport], Transport]) -> Iterator[tuple[PrefillWorker, DecodeByHand]]:
    """A push of one request that may write, by sessions that are wrapped."""
    with welcomed_push(wrap) as (worker, decode):
        decode.channel.send(decode.peer, Grant(T, FIRST, 5000))
        yield worker, decode


@contextmanager
def welcomed_push(wrap: Callable[[Transport], Transport]) -> Iterator[tuple[PrefillWorker, DecodeByHand]]:
    """A push that waits for its grant."""
    shape = Shape()
    decode = DecodeByHand(shape)
    memory = decode.cache.memory(fingerprint_of(shape))
    with (
        closing(decode.channel),
        prefill_rank(Cache(shape), Settings(hold_s=0.3)) as rank,
        closing(rank.sessions.open()) as target,  # where the writes go
    ):
        worker = rank.worker
        wrap_transports(worker, wrap)
        target.register(*memory.spans[0])
        worker.begin_step(PrefillStep(LIFE, (slice_for(decode.address),)))
        worker.end_step()
        decode.hear(Hello)
        decode.channel.send(decode.peer, Welcome(EngineId("decode"), BOOT, target.session, memory.layout))
        decode.hear(Open)
        yield worker, decode


def test_a_fault_that_comes_back_at_each_turn_keeps_no_blocks() -> None:
    with granted_push(Unseen) as (worker, decode):
        assert "cannot be looked at" in decode.hear(Failed).reason
        free = worker.finished([RequestId("r")])
        assert until(lambda: bool(free or worker.finished([])))
        assert not decode.hear(Fenced).is_clean


def test_a_lane_that_was_cut_does_not_call_what_it_has_forgotten_clean() -> None:
    """Its unclean word may be lost on the way; asked once more, it must not sound better."""
    with granted_push(Failing) as (_, decode):
        assert not decode.hear(Fenced).is_clean
        for _ in range(2):
            decode.channel.send(decode.peer, Revoke(T, FIRST))
            assert not decode.hear(Fenced).is_clean


def test_blocks_come_back_at_once_when_decode_dies_before_it_grants() -> None:
    """Nobody will answer the open. The request's deadline, which may be minutes away, is not waited for."""
    with welcomed_push(lambda inner: inner) as (worker, decode):
        worker.finished([RequestId("r")])
        decode.channel.close()
        assert until_freed(worker) == {"r"}


def test_a_retired_lane_leaves_no_descriptor() -> None:
    with welcomed_push(lambda inner: inner) as (worker, decode):
        decode.channel.close()
        lane = worker._lanes[decode.address]
        worker._retire_stale(decode.address, time.monotonic())
        assert until(lambda: lane.is_over)
        worker._free_ended_lanes()
        assert lane._wakeup._is_closed


def test_a_lane_that_no_request_has_used_for_long_is_retired_when_another_one_is_made() -> None:
    """Decode engines that are gone mostly leave no other sign."""
    with welcomed_push(lambda inner: inner) as (worker, decode):
        elsewhere = SideChannelAddress("127.0.0.1", decode.address.port + 1, BootId("another"))
        lane, used_at = worker._lanes[decode.address], worker._used_at[decode.address]
        worker._retire_stale(elsewhere, used_at + UNUSED_S)
        assert worker._lanes == {decode.address: lane}
        worker._retire_stale(elsewhere, used_at + UNUSED_S + 1)
        assert worker._lanes == {}
        decode.channel.close()
        assert until(lambda: lane.is_over)


def test_a_push_that_has_ended_does_not_begin_anew_with_the_next_chunk_of_its_prompt() -> None:
    """Decode was told that no more is written: a second open would get blocks that may be another request's by now."""
    with welcomed_push(lambda inner: inner) as (worker, decode):
        decode.channel.send(decode.peer, Denial(T, FIRST, "not now"))
        assert "not now" in decode.hear(Failed).reason
        first = slice_for(decode.address)
        other = msgspec.structs.replace(first, request_id=RequestId("other"), transfer_id=TransferId("other"))
        worker.begin_step(PrefillStep(LIFE, (first, other)))
        worker.end_step()
        assert decode.hear(Open).transfer_id == "other"


class _NeverAcknowledged(Wrapped):
    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.has_written, self.is_closed = threading.Event(), False

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        self.has_written.set()
        return super().submit_writes(session, ranges)

    def write_status(self, write: WriteId) -> WriteStatus:
        return WriteStatus.PENDING

    def close(self) -> None:
        super().close()
        self.is_closed = True


def test_a_lease_is_renewed_in_the_milliseconds_that_it_has() -> None:
    with welcomed_push(_NeverAcknowledged) as (_, decode):
        decode.channel.send(decode.peer, Grant(T, FIRST, 300))
        assert decode.hear(Progress).transfer_id == T
        decode.channel.send(decode.peer, Revoke(T, FIRST))
        decode.hear(Fenced)


def test_a_write_in_flight_when_decode_is_lost_is_cut_off_before_its_blocks_come_back() -> None:
    """Writes have a connection of their own: what is in flight may still be read here."""
    made: list[_NeverAcknowledged] = []

    def wrap(inner: Transport) -> Transport:
        made.append(_NeverAcknowledged(inner))
        return made[-1]

    with granted_push(wrap) as (worker, decode):
        worker.finished([RequestId("r")])
        assert until(lambda: bool(made), EDGE_S)
        assert made[0].has_written.wait(PATIENCE_S)
        decode.channel.close()
        freed = until_freed(worker)
        assert made[0].is_closed, "the session comes first"
        assert freed == {"r"}


def test_a_lane_that_ends_answers_those_who_wait_until_it_is_quiet() -> None:
    """Else the forward pass would wait for as long as a preemption may."""
    made: list[_NeverAcknowledged] = []

    def wrap(inner: Transport) -> Transport:
        made.append(_NeverAcknowledged(inner))
        return made[-1]

    with granted_push(wrap) as (worker, _):
        assert until(lambda: bool(made), EDGE_S)
        assert made[0].has_written.wait(EDGE_S)
        (lane,) = worker._known_lanes()
        quiet = threading.Event()
        lane.post(Quiesce(PushKey(T, FIRST), quiet))
        assert not quiet.wait(0.1), "its write is under way"
        lane.close(0.0)
        assert quiet.wait(EDGE_S)


class _ClosesSlowly(Failing):
    """Every write fails, and closing takes until it may end."""

    is_closing, may_close = threading.Event(), threading.Event()

    def close(self) -> None:
        self.is_closing.set()
        assert self.may_close.wait(PATIENCE_S)
        super().close()


def test_no_block_is_given_back_before_the_session_that_may_read_it_is_closed() -> None:
    """The order is all of the hard fence on prefill's side."""
    with granted_push(_ClosesSlowly) as (worker, _), ExitStack() as stack:
        stack.callback(_ClosesSlowly.may_close.set)
        assert _ClosesSlowly.is_closing.wait(PATIENCE_S)
        assert worker.finished([RequestId("r")]) == set()
        time.sleep(0.2)
        assert worker.finished([]) == set()
        _ClosesSlowly.may_close.set()
        assert until_freed(worker) == {"r"}


def until_freed(worker: PrefillWorker) -> set[RequestId]:
    """What may be freed, as soon as there is something."""
    freed: set[RequestId] = set()

    def is_freed() -> bool:
        freed.update(worker.finished([]))
        return bool(freed)

    until(is_freed, EDGE_S)
    return freed


class Gate:
    """No write is acknowledged until it is open. The lane goes on meanwhile, unless it is held where it asks."""

    def __init__(self) -> None:
        self._is_open, self._holds, self._is_held = (threading.Event() for _ in range(3))

    def hold_lane(self) -> None:
        """The lane stands where it asks for a write's status, until the gate is opened."""
        self._holds.set()
        assert self._is_held.wait(PATIENCE_S)

    def open(self) -> None:
        self._is_open.set()

    def lets_through(self) -> bool:
        if self._holds.is_set():
            self._is_held.set()
            assert self._is_open.wait(PATIENCE_S)
        return self._is_open.is_set()


class _Gated(Wrapped):
    def __init__(self, inner: Transport, gate: Gate) -> None:
        super().__init__(inner)
        self._gate = gate

    def write_status(self, write: WriteId) -> WriteStatus:
        return super().write_status(write) if self._gate.lets_through() else WriteStatus.PENDING


def gate_writes(pair: Pair) -> Gate:
    gate = Gate()
    wrap_transports(pair.prefill.worker, lambda inner: _Gated(inner, gate))
    return gate


def test_blocks_taken_away_while_the_lane_looks_elsewhere_are_never_called_whole() -> None:
    """The lane sees every write acknowledged before it reads that the blocks were lost: it must look at once more."""
    with make_pair(settings=Settings(preempt_wait_s=0.05)) as pair:
        gate = gate_writes(pair)
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        assert pair.step_until(lambda: bool(pair.target.layers[-1, 5].any()))
        gate.hold_lane()
        pair.prefill.worker.protect_preempted([RequestId("a")])
        gate.open()
        pair.require_lost("a")


def staged(key: PushKey, released: list[str]) -> Staged:
    """A part in staging memory, in an order that a lane may never look at."""
    item = ReshardItem(RequestId("r"), 1, 0, 16, (1,), (2,), 16, 16)
    part = StagedPart(0, 0, np.zeros(1, np.int64), 0, 64)
    return Staged(1, 0, (StagedWrite(key, item, part, 0, StagingBuffer(lambda: released.append("back"))),), 0.0)


def test_what_comes_to_a_lane_that_has_ended_is_let_go() -> None:
    """The resharder may hand out a part at the very moment at which the lane ends."""
    released: list[str] = []
    key, quiet = PushKey(T, FIRST), threading.Event()
    orders: list[Order] = [staged(key, released), Quiesce(key, quiet)]
    with make_pair() as pair:
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        assert pair.step_until(lambda: "a" in pair.ended)
        (lane,) = pair.prefill.worker._known_lanes()
        lane.post(orders[0])  # of a push that it does not know
        lane.close(5)
        assert lane.is_over
        assert released == ["back"]
        for order in (staged(key, released), orders[1]):
            lane.post(order)
        assert released == ["back", "back"]
        assert quiet.is_set()


def test_parts_that_wait_for_a_decode_rank_that_never_answers_are_let_go() -> None:
    released: list[str] = []
    shape, handshake_timeout_s = Shape(), 0.3
    decode, settings = DecodeByHand(shape), Settings(handshake_timeout_s=handshake_timeout_s)
    with closing(decode.channel), prefill_rank(Cache(shape), settings) as rank:
        begin = time.monotonic()
        rank.worker.begin_step(PrefillStep(LIFE, (slice_for(decode.address),)))
        (lane,) = rank.worker._known_lanes()
        lane.post(staged(PushKey(T, FIRST), released))
        assert until(lambda: len(released) == 1, PATIENCE_S)
        assert time.monotonic() - begin >= handshake_timeout_s
        lane.post(staged(PushKey(T, FIRST), released))
        assert until(lambda: released == ["back", "back"], PATIENCE_S)


def test_a_push_straight_from_its_blocks_outlives_the_resharders_failure() -> None:
    """All lanes of a step hear of it; this one is through with the step, and its bytes are still on the way."""
    with make_pair() as pair:
        gate = gate_writes(pair)
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        assert pair.step_until(lambda: bool(pair.target.layers[-1, 5].any()))
        (lane,) = pair.prefill.worker._known_lanes()
        for step in range(4):
            lane.post(ReshardFailed(step, (0,), "the resharder is broken"))
        heard = threading.Event()
        lane.post(Quiesce(PushKey(TransferId("another"), FIRST), heard))
        assert heard.wait(PATIENCE_S)
        gate.open()
        pair.require_received("a")
        assert lane.is_usable
