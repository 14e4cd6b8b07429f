"""What of a step is resharded, and how much staging memory that takes at least."""

from __future__ import annotations

import pytest
import torch

from patience import EDGE_S, until
from pdcluster_connector.core.ranges import GroupSlice
from pdcluster_connector.device import CpuDevice
from pdcluster_connector.reshard.feeds import TokenPages
from pdcluster_connector.reshard.staging import StagingMemory
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import PushSlice, PushTarget
from pdcluster_connector.worker.resharding import GroupResharding, Resharding, StepPush, TokenMemory, plan_item
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import Attempt, EngineId, RequestId, TransferId
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout

OURS = TokenPages(128, 2, 64, 128 * 64, 256 * 64)
"""Pages of 128 tokens in blocks of 256."""


def slice_for(block_tokens: int, page_tokens: int) -> PushSlice:
    target = PushTarget(EngineId("d"), 4, (), 1000, (1, block_tokens), (1, page_tokens))
    groups = (GroupSlice(0, 0, (), ()), GroupSlice(256, 700, (5, 6), (7, 8, 9)))
    return PushSlice(RequestId("r"), TransferId("t"), Attempt(1), "", target, groups, 700, is_last=True)


@pytest.mark.parametrize(("block", "page", "piece"), [(256, 128, 128), (64, 64, 64), (64, 16, 16), (512, 512, 128)])
def test_an_item_has_decodes_blocks_and_the_smaller_page(block: int, page: int, piece: int) -> None:
    item = plan_item(slice_for(block, page), 1, OURS)
    assert item is not None
    assert (item.start, item.stop, item.prefill_blocks, item.decode_blocks) == (256, 700, (5, 6), (7, 8, 9))
    assert (item.decode_tp_size, item.decode_block_tokens, item.piece_tokens) == (4, block, piece)


@pytest.mark.parametrize(("block", "page"), [(256, 96), (96, 96), (256, 0), (0, 1), (64, 48)])
def test_a_decode_engine_whose_pages_do_not_fit_does_not_spoil_the_step_of_the_others(block: int, page: int) -> None:
    assert plan_item(slice_for(block, page), 1, OURS) is None


def layout(kind: RegionKind) -> RankLayout:
    """K and V of one layer: 2 of 8 heads, 16 bytes a cell, pages of 128 tokens."""
    page = 128 * 2 * 16
    return RankLayout(1, 4, tuple(RegionLayout("a", 0, 0, 9, page, page, kind, 8, 128) for _ in "kv"))


@pytest.mark.parametrize(("staging_bytes", "is_enough"), [(65_535, False), (65_536, True)])
def test_staging_memory_holds_a_page_of_all_heads_of_a_layer_twice_or_the_engine_does_not_start(
    staging_bytes: int, *, is_enough: bool
) -> None:
    ours = layout(RegionKind.TOKENS)
    data = {index: torch.zeros(9 * ours.regions[0].page_bytes, dtype=torch.uint8) for index in range(2)}
    staging = StagingMemory(staging_bytes, torch.device("cpu"))
    tokens = TokenMemory(None, data)
    if is_enough:
        GroupResharding(ours, tokens, staging, CpuDevice(), Settings()).close(5)
        return
    with pytest.raises(ConfigError, match=r"staging_bytes is 65535, and a page of one layer has 32768 .*use 65536"):
        GroupResharding(ours, tokens, staging, CpuDevice(), Settings())


def test_what_is_resharded_for_a_decode_rank_without_a_lane_takes_no_staging_memory() -> None:
    """The process had no room for the lane."""
    page = 128 * 8 * 16
    ours = RankLayout(0, 1, (RegionLayout("a", 0, 0, 9, page, page, RegionKind.TOKENS, 8, 128),))
    staging = StagingMemory(65_536, torch.device("cpu"))
    device = CpuDevice()
    resharding = GroupResharding(
        ours, TokenMemory(None, {0: torch.zeros(9 * page, dtype=torch.uint8)}), staging, device, Settings()
    )
    target = PushTarget(EngineId("d"), 4, (), 1000, (128,), (128,))
    part = PushSlice(
        RequestId("r"),
        TransferId("t"),
        Attempt(1),
        "",
        target,
        (GroupSlice(0, 256, (5, 6), (7, 8)),),
        256,
        is_last=True,
    )
    for step in range(1, 4):
        resharding.begin_step(step, [StepPush(part, ())])
        resharding.layer_saved(range(1), device.record())
        resharding.end_step()
    assert until(lambda: resharding.read_step == 3)
    assert resharding.close(EDGE_S)
    assert staging._pool.is_idle


def test_without_a_resharder_blocks_are_read_by_lanes_only() -> None:
    none = Resharding()
    assert none.fence().is_set()
    assert none.read_step > 1 << 40
