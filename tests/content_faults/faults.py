"""Ways in which KV arrives wrong, each done to one decode rank's memory where the request has its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from content_faults.scene import CACHED, CELL, DECODE_BLOCK, PAGE, Bytes, Rank, by_heads
from pdcluster_protocol.side_channel import RegionKind, RegionLayout

Fault = Callable[[Rank, np.random.Generator], None]


def _region(rank: Rank, dice: np.random.Generator, *, needs_tokens: bool = False) -> RegionLayout:
    regions = [r for r in rank.layout.regions if r.kind is not RegionKind.STATE or not needs_tokens]
    return regions[dice.integers(len(regions))]


def _pushed(rank: Rank, region: RegionLayout) -> tuple[int, ...]:
    """The request's blocks that came from prefill. The last one is partly filled, and so left alone."""
    table = rank.tables[region.group]
    return table if region.kind is RegionKind.STATE else table[CACHED // DECODE_BLOCK : -1]


def _block(rank: Rank, dice: np.random.Generator, *, needs_tokens: bool = False) -> tuple[RegionLayout, Bytes]:
    region = _region(rank, dice, needs_tokens=needs_tokens)
    pushed = _pushed(rank, region)
    return region, rank.blocks(region)[pushed[dice.integers(len(pushed))]]


def bit_flip(rank: Rank, dice: np.random.Generator) -> None:
    """One bit is another."""
    _, block = _block(rank, dice)
    block[dice.integers(len(block))] ^= 1 << dice.integers(8)


def torn_page(rank: Rank, dice: np.random.Generator) -> None:
    """The end of a block is what another request had there."""
    _, block = _block(rank, dice)
    cut = dice.integers(len(block))
    block[cut:] = dice.integers(0, 256, len(block) - cut, np.uint8)


def stale_block(rank: Rank, dice: np.random.Generator) -> None:
    """A whole block is what another request had there."""
    _, block = _block(rank, dice)
    block[:] = dice.integers(0, 256, len(block), np.uint8)


def zeroed_block(rank: Rank, dice: np.random.Generator) -> None:
    """A whole block is empty."""
    _block(rank, dice)[1][:] = 0


def swapped_blocks(rank: Rank, dice: np.random.Generator) -> None:
    """Two blocks of a layer are in each other's place."""
    region = _region(rank, dice, needs_tokens=True)
    first, second = dice.choice(_pushed(rank, region), 2, replace=False)
    blocks = rank.blocks(region)
    blocks[[first, second]] = blocks[[second, first]]


def swapped_layers(rank: Rank, dice: np.random.Generator) -> None:
    """A block of one layer is in the place of another layer's."""
    heads = [r for r in rank.layout.regions if r.kind is RegionKind.HEADS]
    one, other = (heads[place] for place in dice.choice(len(heads), 2, replace=False))
    pushed = _pushed(rank, one)
    block = pushed[dice.integers(len(pushed))]
    ours, theirs = rank.blocks(one)[block], rank.blocks(other)[block]
    ours[:], theirs[:] = theirs.copy(), ours.copy()


def wrong_head(rank: Rank, dice: np.random.Generator) -> None:
    """A head has what is another's: two are exchanged; a rank's only one gets bytes that are not its own."""
    region, block = _block(rank, dice, needs_tokens=True)
    heads = by_heads(block, region)
    if len(heads) > 1:
        first, second = dice.choice(len(heads), 2, replace=False)
        heads[[first, second]] = heads[[second, first]]
    else:
        heads[0] = dice.permutation(heads[0].reshape(-1)).reshape(PAGE, CELL)


def wrong_order(rank: Rank, dice: np.random.Generator) -> None:
    """The dimensions of a page are taken for each other: heads for tokens, or of one head tokens for words."""
    region, block = _block(rank, dice, needs_tokens=True)
    heads = len(block) // (PAGE * CELL)
    first, second = (PAGE, heads) if region.kind is RegionKind.TOKENS else (heads, PAGE)
    shape = (first, second, CELL) if heads > 1 else (PAGE, CELL // 8, 8)
    block[:] = block.reshape(shape).transpose(1, 0, 2).copy().reshape(-1)


def missing_layer(rank: Rank, dice: np.random.Generator) -> None:
    """Nothing of one layer came."""
    region = _region(rank, dice)
    blocks = rank.blocks(region)
    for block in _pushed(rank, region):
        blocks[block] = dice.integers(0, 256, blocks.shape[1], np.uint8)


FAULTS: Final[dict[str, Fault]] = {
    "one bit": bit_flip,
    "torn page": torn_page,
    "stale block": stale_block,
    "empty block": zeroed_block,
    "two blocks swapped": swapped_blocks,
    "blocks of two layers swapped": swapped_layers,
    "wrong head": wrong_head,
    "wrong order of dimensions": wrong_order,
    "a layer missing": missing_layer,
}
