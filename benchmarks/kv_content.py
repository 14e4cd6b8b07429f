"""The content of a benchmark request's blocks: bytes that follow from the request's name and their place in it.

A rank's memory as words of 8 bytes, in the order of ``kv_shape.py``:  [layer][block][head][word]

    word k of layer l, position p (which of the request's blocks), head h  =  first[l, p, h] + k * _STEP   mod 2^64

``first`` is random, seeded by the request's name, so no two requests hold the same. Each end works it out alone:
prefill fills its blocks before a transfer, decode compares its own afterwards. This file does not know how a connector
or a reference plans its ranges, so a range to a wrong place is found. No I/O, no clock.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from benchmarks.kv_shape import KvShape, TpRank
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_WORD_BYTES: Final = 8
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so all words of a piece differ."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One head of one block in one layer. ``position``: the block's place in the request's block table."""

    layer: int
    position: int
    block: int
    head: int

    def __str__(self) -> str:
        return f"layer {self.layer}, position {self.position} (block {self.block}), head {self.head}"


class KvWords:
    """One rank's KV memory, borrowed: its owner keeps it longer than this object lives. One thread."""

    def __init__(self, shape: KvShape, tp: TpRank, memory: bytearray | memoryview | mmap.mmap) -> None:
        """``memory``: ``shape.rank_bytes(tp.size)`` bytes, writable."""
        self._heads, self._all_heads = shape.heads_of(tp), shape.kv_heads
        num_words = shape.head_bytes * shape.block_size // _WORD_BYTES
        self._words: Words = np.frombuffer(memory, np.uint64).reshape(
            shape.num_layers, shape.num_blocks, len(self._heads), num_words
        )
        self._steps = np.arange(num_words, dtype=np.uint64) * _STEP
        self._expected: Words = np.empty((len(self._heads), num_words), np.uint64)

    def fill(self, name: str, blocks: Sequence[int]) -> None:
        """``blocks`` hold the content of request ``name``."""
        firsts = self._firsts(name, len(blocks))
        for layer, of_layer in enumerate(self._words):
            for position, block in enumerate(blocks):
                np.add(firsts[layer, position], self._steps, out=of_layer[block])

    def wipe(self, blocks: Sequence[int]) -> None:
        """``blocks`` hold zeros."""
        for of_layer in self._words:
            for block in blocks:
                of_layer[block] = 0

    def wrong_pieces(self, name: str, blocks: Sequence[int]) -> Iterator[Piece]:
        """The pieces of ``blocks`` whose content is not that of request ``name``; each byte is compared."""
        firsts = self._firsts(name, len(blocks))
        for layer, of_layer in enumerate(self._words):
            for position, block in enumerate(blocks):
                np.add(firsts[layer, position], self._steps, out=self._expected)
                if not np.array_equal(self._expected, of_layer[block]):
                    wrong = (self._expected != of_layer[block]).any(axis=1).nonzero()[0]
                    yield from (Piece(layer, position, block, self._heads[head]) for head in wrong)

    def describe_wrong(self, name: str, blocks: Sequence[int]) -> str:
        """How much of the request is wrong, and where it begins; empty when every byte is right."""
        wrong = list(self.wrong_pieces(name, blocks))
        total = len(self._words) * len(blocks) * len(self._heads)
        return f"{len(wrong):,} of {total:,} pieces of {name}, the first in {wrong[0]}" if wrong else ""

    def _firsts(self, name: str, num_blocks: int) -> Words:
        """``first`` as [layer, position, head of this rank, 1]. Drawn for all heads, so every rank draws the same."""
        dice = np.random.default_rng(list(name.encode()))
        firsts = dice.integers(1, 1 << 63, (len(self._words), num_blocks, self._all_heads, 1), np.uint64)
        return firsts[:, :, self._heads.start : self._heads.stop]
