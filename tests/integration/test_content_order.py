"""Content is compared beside the forward pass: no step holds it up, and no step's overwriting goes unseen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Final

import msgspec
import pytest

from fakes.async_device import AsyncRuntime, async_device
from fakes.transports import Late, Permuting, Wire, wrap_transports
from integration.ranks import BLOCK_SIZE, HEAD_BYTES, Pair, make_pair
from integration.slow_prefill import SETTINGS
from patience import EDGE_S, PATIENCE_S, until
from pdcluster_connector.core.content import ContentPart, ContentPlan, parts_pushed, parts_received, plan_content
from pdcluster_connector.engine_facts import Memory
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.worker.content_sums import KvReader, SumsUnderWay
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.side_channel import RankLayout

HASTY: Final = msgspec.structs.replace(SETTINGS, preempt_wait_s=0.05)
SETTINGS_THAT_WAIT: Final = msgspec.structs.replace(SETTINGS, preempt_wait_s=EDGE_S)
OURS, THEIRS = [3, 4, 5, 9], [8, 9, 2, 30]
SPOILT: Final = 0xEE


def on_device(runtime: AsyncRuntime) -> Callable[[Memory], Memory]:
    """The memory's tensors are the device's."""
    return lambda memory: replace(memory, views=tuple(map(runtime.tensor, memory.views)))


@pytest.mark.parametrize("side", Role)
def test_sums_are_read_while_the_forward_pass_is_at_another_step(side: Role) -> None:
    """Both ranks are on devices; prefill's bytes wait on the wire until the test lets them."""
    with ExitStack() as stack:
        made = {role: stack.enter_context(async_device()) for role in Role}
        changes = {role: on_device(runtime) for role, (_, runtime) in made.items()}
        devices = {role: device for role, (device, _) in made.items()}
        pair = stack.enter_context(make_pair(settings=SETTINGS, changes=changes, devices=devices))
        for _, runtime in made.values():
            stack.callback(runtime.release)
        wire, stream = Wire(is_holding=True), made[side][1].default
        wrap_transports(pair.prefill.worker, lambda inner: Late(inner, wire))
        pair.compare("a", [1], [5], deadline_ms=120_000)
        assert until(lambda: wire.num_submitted == len(pair.source.shape.layer_names()))
        stream.hold()
        stream.give(lambda: None)
        given = stream.num_given
        wire.is_holding = False
        pair.require_received("a")
        assert stream.num_done < stream.num_given
        assert stream.num_given == given, "the sums gave work to the forward pass's stream"


@dataclass(slots=True)
class Gate:
    """Sums are found behind it. Opens when the test says so, or after ``num_looks`` of the thread that finds them."""

    num_looks: int = 1 << 62
    is_reached: Event = field(default_factory=Event)
    is_open: Event = field(default_factory=Event)

    def look(self) -> bool:
        """Whether it is open. Bytes that are to be summed up were acknowledged, or have come."""
        self.is_reached.set()
        self.num_looks -= 1
        return self.is_open.is_set() or self.num_looks < 0


class GatedSums(SumsUnderWay):
    gate: Gate

    def advance(self) -> bool:
        return super().advance() if self.gate.look() else True


@dataclass(frozen=True, slots=True)
class GatedReader(KvReader):
    """Reads nothing of a request before its gate is open."""

    gate: Gate = field(default_factory=Gate)

    def pushed(self, decode: RankLayout, order: ContentOrder, key: str) -> SumsUnderWay:
        return self._gated(
            plan_content(order.check, decode, order.spans, key), parts_pushed(self.layout, decode), order, key
        )

    def received(self, order: ContentOrder, key: str, *, has_draft: bool = False) -> SumsUnderWay:
        parts = parts_received(self.layout, has_draft=has_draft)
        return self._gated(plan_content(order.check, self.layout, order.spans, key), parts, order, key)

    def _gated(self, plan: ContentPlan, parts: Sequence[ContentPart], order: ContentOrder, key: str) -> GatedSums:
        sums = GatedSums(self, plan, parts, order, key)
        sums.gate = self.gate
        return sums


@dataclass(frozen=True, slots=True)
class GatedMemory(Memory):
    """Is read through a gate."""

    gate: Gate = field(default_factory=Gate)

    @property
    def reader(self) -> KvReader:
        return GatedReader(self.layout, self.views, gate=self.gate)


def gated(gate: Gate) -> Callable[[Memory], Memory]:
    return lambda memory: GatedMemory(memory.layout, memory.spans, memory.fingerprint, memory.views, gate)


def preempt_behind(gate: Gate, pair: Pair) -> None:
    """While sums wait for the gate vLLM takes the request's blocks, and another request's KV is in them at once."""
    pair.compare("a", OURS, THEIRS, deadline_ms=120_000)
    assert gate.is_reached.wait(PATIENCE_S)
    pair.prefill.worker.protect_preempted([RequestId("a")])
    pair.source.layers[:] = SPOILT


def has_spoilt(pair: Pair) -> bool:
    """Whether a block of decode's has what was written over prefill's."""
    return bool((pair.target.layers == SPOILT).all(axis=-1).any())


def astray_once(pair: Pair) -> None:
    """Each row of a head is written into the other head's place the first time."""
    seen: set[int] = set()

    def place(row: int) -> int:
        is_new = row not in seen
        seen.add(row)
        return row ^ 1 if is_new else row

    begin = pair.target.layers.ctypes.data
    wrap_transports(pair.prefill.worker, lambda inner: Permuting(inner, begin, BLOCK_SIZE * HEAD_BYTES, place))


def test_what_is_overwritten_before_it_was_summed_up_is_lost_and_never_pushed_again() -> None:
    """Its sums would be those of another request's KV, and so would be what a second push brings."""
    gate = Gate()
    with make_pair(settings=HASTY, changes={Role.PREFILL: gated(gate)}) as pair:
        preempt_behind(gate, pair)
        gate.is_open.set()
        pair.require_lost("a")
        assert "preempted" in pair.losses[0].reason
        assert not has_spoilt(pair)


@pytest.mark.parametrize("is_astray", [False, True])
def test_a_preemption_waits_for_sums_and_after_it_nothing_is_pushed_again(*, is_astray: bool) -> None:
    gate = Gate(num_looks=1000)
    with make_pair(settings=SETTINGS_THAT_WAIT, changes={Role.PREFILL: gated(gate)}) as pair:
        if is_astray:
            astray_once(pair)
        before = pair.source.layers[:, OURS].copy()
        preempt_behind(gate, pair)
        if is_astray:
            pair.require_lost("a")
        else:
            pair.require_received("a")
            assert (pair.target.layers[:, THEIRS] == before).all()
        assert not has_spoilt(pair)


def test_a_request_that_is_preempted_while_decode_compares_is_not_pushed_again() -> None:
    gate = Gate()
    with make_pair(settings=SETTINGS_THAT_WAIT, changes={Role.DECODE: gated(gate)}) as pair:
        astray_once(pair)
        preempt_behind(gate, pair)
        gate.is_open.set()
        pair.require_lost("a")
        assert "let go of what decode wants a second time" in pair.losses[0].reason
        assert not has_spoilt(pair)


def test_what_nobody_waits_for_any_more_is_not_read_on() -> None:
    gate = Gate()
    with make_pair(settings=SETTINGS_THAT_WAIT, changes={Role.DECODE: gated(gate)}) as pair:
        pair.compare("a", OURS, THEIRS, deadline_ms=120_000)
        assert gate.is_reached.wait(PATIENCE_S)
        pair.cancel("a")
        pair.require_lost("a")
        assert until(lambda: not pair.decode.worker._sums.is_busy, EDGE_S), "its blocks may be another request's"
