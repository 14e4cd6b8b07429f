"""The pools of the benchmarks hand blocks out as vLLM's do."""

from __future__ import annotations

from itertools import pairwise

import pytest
from benchmarks.block_tables import FreeBlocks, Placement, block_tables
from vllm.v1.core.block_pool import BlockPool


@pytest.mark.parametrize(("placement", "neighbours"), [*zip(Placement, [(100, 100), (5, 90), (0, 5)], strict=True)])
def test_requests_that_live_together_share_no_block_and_lie_as_their_pool_has_them(
    placement: Placement, neighbours: tuple[int, int]
) -> None:
    """``neighbours``: how many of a hundred blocks follow the one before, at least and at most."""
    tables = block_tables(placement, [128] * 8, 2049, seed=1)
    blocks = [block for table in tables for block in table]
    assert [len(table) for table in tables] == [128] * 8
    assert len(set(blocks) - {0}) == len(blocks)
    follow = [abs(after - before) == 1 for table in tables for before, after in pairwise(table)]
    assert neighbours[0] <= 100 * sum(follow) / len(follow) <= neighbours[1]


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_the_list_is_vllms(has_prefix_cache: bool) -> None:
    ours = FreeBlocks(17, has_prefix_cache=has_prefix_cache)
    theirs = BlockPool(17, enable_caching=has_prefix_cache, hash_block_size=16)
    alive = []
    for count in (4, 7, 2):
        blocks = theirs.get_new_blocks(count)
        table = ours.take(count)
        assert [block.block_id for block in blocks] == list(table)
        alive.append((table, blocks))
    for table, blocks in (alive[1], alive[0]):
        ours.give_back(table)
        for block in blocks if has_prefix_cache else ():
            block._block_hash = b"kept"  # what vLLM's prefix cache leaves on a full block
        theirs.free_blocks(reversed(blocks))
    free = [block.block_id for block in theirs.free_block_queue.get_all_free_blocks()]
    assert free == list(ours.take(len(ours)))
