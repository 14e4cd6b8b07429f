"""Block tables as an engine's requests get them: from a fresh pool, from one long in use, and the worst case. Pure.

Source of truth: vLLM 0.32 ``v1/core/block_pool.py`` and ``single_type_kv_cache_manager.py``. A request takes blocks
from the front of the free list, and gives them back with the last block first. With a prefix cache these blocks go to
the end of the list, without a prefix cache to its front. So in a pool that was used once, neighbours come in falling
order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Final

BlockTable = tuple[int, ...]
_OTHERS_SIZES: Final = (4, 16, 32, 128)
_OTHERS_ALIVE: Final = 8
_NUM_OTHERS: Final = 400


class Placement(Enum):
    """Where a request's blocks lie."""

    FRESH = "fresh pool"
    """Side by side: no request has given a block back yet."""
    USED = "used pool"
    """After some hundred requests of other sizes."""
    SCATTERED = "scattered"
    """At random: hardly any blocks can be joined."""


class FreeBlocks:
    """vLLM's list of free blocks; block 0 is never given away."""

    def __init__(self, num_blocks: int, *, has_prefix_cache: bool = True) -> None:
        self._free = deque(range(1, num_blocks))
        self._has_prefix_cache = has_prefix_cache

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> BlockTable:
        """The blocks of a new request. At least ``count`` blocks must be free."""
        return tuple(self._free.popleft() for _ in range(count))

    def give_back(self, table: Sequence[int]) -> None:
        """The request has ended."""
        if self._has_prefix_cache:
            self._free.extend(reversed(table))
        else:
            self._free.extendleft(table)  # leaves the last block in front


def block_tables(placement: Placement, counts: Sequence[int], num_blocks: int, seed: int) -> list[BlockTable]:
    """One table for each of ``counts``, for requests that are alive at the same time in a pool of ``num_blocks``."""
    if placement is Placement.SCATTERED:
        chosen = random.Random(seed).sample(range(1, num_blocks), sum(counts))
        return _cut(chosen, counts)
    pool = FreeBlocks(num_blocks)
    if placement is Placement.USED:
        _use(pool, random.Random(seed))
    return [pool.take(count) for count in counts]


def _use(pool: FreeBlocks, dice: random.Random) -> None:
    """Other requests come and go, and are all gone at the end."""
    sizes = [size for size in _OTHERS_SIZES if size * _OTHERS_ALIVE <= len(pool)] or [1]
    alive: list[BlockTable] = []
    for _ in range(_NUM_OTHERS):
        size = dice.choice(sizes)
        while alive and (len(alive) == _OTHERS_ALIVE or len(pool) < size):
            pool.give_back(alive.pop(dice.randrange(len(alive))))
        alive.append(pool.take(size))
    for table in alive:
        pool.give_back(table)


def _cut(blocks: Sequence[int], counts: Sequence[int]) -> list[BlockTable]:
    tables, start = [], 0
    for count in counts:
        tables.append(tuple(blocks[start : start + count]))
        start += count
    return tables
