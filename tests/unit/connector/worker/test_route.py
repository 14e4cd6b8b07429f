"""Which regions of a link are copied from their blocks, and which come through staging memory."""

from __future__ import annotations

import pytest

from integration.ranks import Shape, fingerprint_of
from pdcluster_connector.core.ranges import GroupSlice
from pdcluster_connector.core.sending import Push, PushKey, Send
from pdcluster_connector.steps import PushSlice, PushTarget
from pdcluster_connector.worker.orders import LayerSaved
from pdcluster_connector.worker.pushes import LivePush
from pdcluster_connector.worker.route import Route, StepPlan, plan_route
from pdcluster_protocol.errors import ProtocolError, Unavailable
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.side_channel import Failed, Hello, RankLayout, RegionKind, RegionLayout, Welcome

BOOT, FIRST = BootId("b"), Attempt(1)


def layout(tp_size: int, heads: int = 4) -> RankLayout:
    """Rank 0 with one layer of two regions: pages of 16 tokens in blocks of 32, cells of 8 bytes."""
    page = 16 * (heads // tp_size) * 8
    regions = tuple(RegionLayout("a", 0, 0, 9, page, page, RegionKind.TOKENS, heads, 16, 2) for _ in "kv")
    return RankLayout(0, tp_size, regions)


def route(prefill_tp: int, decode_tp: int, *, can_reshard: bool = True, boot_id: BootId = BOOT) -> Route:
    hello = Hello(EngineId("p"), BootId("p:1"), layout(prefill_tp), fingerprint_of(Shape()))
    welcome = Welcome(EngineId("d"), BOOT, "session", layout(decode_tp))
    return plan_route(welcome, boot_id, hello, can_reshard=can_reshard)


def test_equal_tp_goes_straight_from_the_blocks_whether_there_is_a_resharder_or_not() -> None:
    for can_reshard in (False, True):
        made = route(2, 2, can_reshard=can_reshard)
        assert (set(made.direct), set(made.staged)) == ({0, 1}, set())


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (4, 2)])
def test_unequal_tp_is_staged(prefill_tp: int, decode_tp: int) -> None:
    made = route(prefill_tp, decode_tp)
    assert (set(made.direct), set(made.staged), made.num_layers) == (set(), {0, 1}, 1)


def test_without_a_resharder_unequal_tp_is_refused_with_both_values() -> None:
    with pytest.raises(ProtocolError, match=r"from TP 2 to TP 1 without a resharder.*use one TP"):
        route(2, 1, can_reshard=False)


def test_another_life_of_the_decode_engine_is_refused() -> None:
    with pytest.raises(Unavailable, match="restarted"):
        route(2, 1, boot_id=BootId("before"))


def test_an_engine_of_impossible_size_is_refused_before_anything_is_worked_out_for_it() -> None:
    hello = Hello(EngineId("p"), BootId("p:1"), layout(1), fingerprint_of(Shape()))
    for size in (0, -1, 1 << 62):
        welcome = Welcome(EngineId("d"), BOOT, "session", RankLayout(0, size, layout(1).regions))
        with pytest.raises(ProtocolError, match=rf"decode engine d says TP {size} in 1 stages"):
            plan_route(welcome, BOOT, hello)


def test_a_reservation_that_names_other_pages_than_the_handshake_is_refused_with_both_values() -> None:
    """The blocks in staging memory were laid out as the reservation said."""
    made = route(2, 1)
    made.require_pages(PushTarget(EngineId("d"), 1, (), 1, (32,), (16,)))
    with pytest.raises(ProtocolError, match=r"\(32, 32\) tokens in KV group 0, but holds \(32, 16\)"):
        made.require_pages(PushTarget(EngineId("d"), 1, (), 1, (32,), (32,)))
    route(2, 2).require_pages(PushTarget(EngineId("d"), 1, (), 1))


def live_push(name: str) -> LivePush:
    return LivePush(Push(PushKey(TransferId(name), FIRST), hold_s=1.0, deadline=9.0), RequestId(name), "", 32, 0.0)


def part_of(name: str, decode_pages: int) -> PushSlice:
    """One block of 32 tokens for a decode engine that says it has pages of ``decode_pages`` tokens."""
    target = PushTarget(EngineId("d"), 1, (), 1, (32,), (decode_pages,))
    groups = (GroupSlice(0, 32, (1,), (2,)),)
    return PushSlice(RequestId(name), TransferId(name), FIRST, "", target, groups, num_prompt_tokens=32, is_last=True)


def test_a_push_whose_reservation_does_not_fit_the_handshake_is_given_up_before_any_byte() -> None:
    made, plan, live = route(2, 1), StepPlan(1), live_push("r")
    live.push.grant(9.0, now=0.0)
    (said, *_) = plan.add(made, live, part_of("r", 32), now=0.0)
    assert isinstance(said, Send)
    assert isinstance(said.message, Failed)
    assert "pages of (32, 32) tokens" in said.message.reason
    assert plan.staging_pushes == []


def test_all_requests_of_a_step_are_one_batch_for_each_region() -> None:
    made, plan = route(2, 2), StepPlan(1)
    lives = [live_push(name) for name in "abc"]
    for live in lives:
        plan.add(made, live, part_of(live.request_id, 16), now=0.0)
    batches = list(plan.batches(made, LayerSaved(1, range(2), None, 0.0)))
    assert [[part.push for part in batch.parts] for batch in batches] == [[live.push for live in lives]] * 2
