"""A second push of resharded KV goes token by token, and has a bound."""

from __future__ import annotations

from threading import Event

import pytest

from fakes.network import FakeNetwork
from integration.ranks import Shape as RankShape
from integration.ranks import fingerprint_of
from patience import PATIENCE_S
from pdcluster_connector.core.sending import Push, PushKey
from pdcluster_connector.device import CpuDevice
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.trace import Trace
from pdcluster_connector.transport.sessions import Sessions
from pdcluster_connector.worker.outbound import Outbound
from pdcluster_connector.worker.pushes import LivePush, PushBook
from pdcluster_connector.worker.route import Route, plan_route
from pdcluster_connector.worker.second_push import MAX_WRITES, plan_again
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.side_channel import (
    Again,
    ContentSums,
    Failed,
    Hello,
    RankLayout,
    RegionKind,
    RegionLayout,
    ToDecode,
    Welcome,
)

BLOCK, HEADS, CELL = 32, 4, 8
NUM_TOKENS = 2 * MAX_WRITES
NUM_BLOCKS = NUM_TOKENS // BLOCK + 1
KEY = PushKey(TransferId("t"), Attempt(1))


def layout(tp_size: int) -> RankLayout:
    page = BLOCK * HEADS // tp_size * CELL
    kind = (RegionKind.TOKENS, HEADS, BLOCK)
    return RankLayout(tp_size - 1, tp_size, tuple(RegionLayout(n, 0, 0, NUM_BLOCKS, page, page, *kind) for n in "ab"))


def route(prefill_tp: int) -> Route:
    hello = Hello(EngineId("p"), BootId("p:1"), layout(prefill_tp), fingerprint_of(RankShape()))
    return plan_route(Welcome(EngineId("d"), BootId("b"), "", layout(1)), BootId("b"), hello, can_reshard=True)


def live_push() -> LivePush:
    live = LivePush(Push(KEY, hold_s=1.0, deadline=9.0), RequestId("r"), "", NUM_TOKENS, 0.0)
    blocks = tuple(range(1, NUM_BLOCKS))
    live.content = ContentOrder((((0, NUM_TOKENS),),), (blocks,), targets=(blocks[::-1],))
    return live


def again(regions: tuple[int, ...], stop: int) -> Again:
    return Again(*KEY, regions, ((0, stop),))


def test_each_token_is_a_write_of_the_ranks_own_heads() -> None:
    live = live_push()
    (part,) = plan_again(route(2), live, again((1,), 256), now=0.0)
    assert part.buffer is None
    assert (part.record.layer, len(part.ranges.source)) == (1, 256)
    assert set(part.ranges.num_bytes.tolist()) == {2 * CELL}
    assert live.layers == [part.record]


def test_as_many_writes_as_the_bound_are_pushed_and_not_one_more() -> None:
    assert len(plan_again(route(2), live_push(), again((0, 1), MAX_WRITES // 2), now=0.0)) == 2
    live = live_push()
    with pytest.raises(ProtocolError, match=f"more than {MAX_WRITES} writes"):
        plan_again(route(2), live, again((0, 1), MAX_WRITES // 2 + 1), now=0.0)
    assert live.layers == [], "the trace shows writes that never were"


def test_equal_tp_takes_few_writes_for_the_same_tokens() -> None:
    parts = plan_again(route(1), live_push(), again((0, 1), NUM_TOKENS), now=0.0)
    assert sum(part.ranges.total_bytes for part in parts) == 2 * NUM_TOKENS * HEADS * CELL


def test_a_second_push_of_too_many_writes_is_told_to_decode_and_its_source_is_let_go() -> None:
    said: list[ToDecode] = []
    released: list[RequestId] = []
    book = PushBook(said.append, released.append, lambda _: None, Trace(""), lambda _: None)
    out, has_opened = Outbound(book, CpuDevice(), frozenset()), Event()
    live = live_push()
    book.add(live)
    out.open(route(2), "", Sessions(FakeNetwork().join), has_opened.set)
    assert has_opened.wait(PATIENCE_S)
    assert out.enter()
    live.push.wants_sums = True
    live.push.plan(0, 1, is_last=True)
    live.push.grant(9.0, now=0.0)
    live.push.summed_up(ContentSums(b"", b""))
    out.push_again(again((0, 1), NUM_TOKENS), now=1.0)
    (failed,) = said
    assert isinstance(failed, Failed)
    assert "it needs another attempt" in failed.reason
    assert failed.is_fenced
    assert released == ["r"]
    assert out.close()
