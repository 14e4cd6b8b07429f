"""A reservation that names what decode does not have: its own push is given up, and no other on the same lane."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from integration.ranks import BLOCK_SIZE, Pair, Shape, make_pair
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import PushSlice

PATIENT = Settings(quarantine_s=30, hold_s=30, lease_s=60, handshake_timeout_s=60)
SHAPE = Shape()


def require_only_this_one_fails(pair: Pair, false: PushSlice, reason: str) -> None:
    """``false``, a push named "false", is given up before any byte; what goes by the same lane arrives."""
    before = pair.target.layers.copy()
    pair.expect("good", 2)
    pair.forward(pair.slice_of("good", [2], [6], is_last=False))
    pair.expect("false", 1)
    pair.forward(false)
    assert pair.step_until(lambda: "false" in pair.ended)
    assert [lost.request_id for lost in pair.losses] == ["false"]
    assert reason in pair.losses[0].reason
    pair.forward(pair.slice_of("good", [4], [7]))
    assert pair.step_until(lambda: "good" in pair.ended)
    assert pair.ended == {"good": True, "false": False}
    before[:, [6, 7]] = pair.source.layers[:, [2, 4]]
    assert np.array_equal(pair.target.layers, before)


# The last but two comes round to block 0 in 64 bits; the last two do not fit into them.
@pytest.mark.parametrize("block", [SHAPE.num_blocks, 10**6, 1 << 40, -1, 1 << 62, 1 << 63, 1 << 70])
def test_a_block_that_decode_does_not_have_is_refused_and_the_lane_goes_on(block: int) -> None:
    with make_pair(SHAPE, PATIENT) as pair:
        require_only_this_one_fails(pair, pair.slice_of("false", [3], [block]), f"reserved block {block} in KV group 0")


@pytest.mark.parametrize("block_tokens", [1, BLOCK_SIZE // 2, 2 * BLOCK_SIZE, 1 << 60])
def test_blocks_of_another_size_than_decodes_are_refused_and_the_lane_goes_on(block_tokens: int) -> None:
    with make_pair(SHAPE, PATIENT) as pair:
        part = pair.slice_of("false", [3], [8])
        target = msgspec.structs.replace(part.target, block_tokens=(block_tokens,), page_tokens=(block_tokens,))
        require_only_this_one_fails(
            pair, msgspec.structs.replace(part, target=target), f"of {block_tokens} tokens in KV group 0"
        )


def test_a_table_that_is_too_short_is_refused_and_the_lane_goes_on() -> None:
    with make_pair(SHAPE, PATIENT) as pair:
        part = pair.slice_of("false", [3, 5], [8])
        require_only_this_one_fails(pair, part, "named 1 blocks in KV group 0 for tokens 0 to 32")
