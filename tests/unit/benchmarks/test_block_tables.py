"""The pools of the benchmarks hand blocks out as vLLM's do."""

from __future__ import annotations

import pytest
from benchmarks.block_tables import FreeBlocks, Placement, block_tables
from vllm.v1.core.block_pool import BlockPool


@pytest.mark.parametrize("placement", list(Placement))
def test_requests_that_live_together_share_no_block(placement: Placement) -> None:
    tables = block_tables(placement, [128] * 8, 2049, seed=1)
    blocks = [block for table in tables for block in table]
    assert [len(table) for table in tables] == [128] * 8
    assert len(set(blocks)) == len(blocks)
    assert 0 not in blocks


def test_a_fresh_pool_gives_neighbours() -> None:
    assert block_tables(Placement.FRESH, [3, 2], 10, seed=1) == [(1, 2, 3), (4, 5)]


def test_a_pool_used_once_gives_its_blocks_in_falling_order() -> None:
    pool = FreeBlocks(5)
    pool.give_back(pool.take(4))
    assert pool.take(4) == (4, 3, 2, 1)


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
