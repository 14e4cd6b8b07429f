"""Which KV blocks of a prompt became complete at this step.

A block is pushed once, whole, as soon as the last of its tokens is scheduled; the block that the
prompt's end leaves partly filled is complete when the prompt is. Blocks below the watermark were
pushed in an earlier step, or are in decode's prefix cache.

    prompt of 300 tokens, block size 128, decode has the first 128, chunks of 100:
      step 1 -> 100 computed: nothing     step 3 -> 300 computed: blocks 2..2
      step 2 -> 200 computed: nothing     (block 1 is complete at 256: also in step 3)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as both engines see it. ``cached_tokens``: decode has them already; a multiple of the block size."""

    num_tokens: int
    cached_tokens: int
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.cached_tokens % self.block_size:
            raise ValueError(f"{self.cached_tokens} cached tokens do not end on a block of {self.block_size}")
        if not 0 <= self.cached_tokens < self.num_tokens:
            raise ValueError(f"{self.cached_tokens} cached tokens of a prompt of {self.num_tokens}")

    @property
    def first_block(self) -> int:
        """Position of the first block that decode lacks."""
        return self.cached_tokens // self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the whole prompt, the last one perhaps partly filled."""
        return -(-self.num_tokens // self.block_size)

    def complete_blocks(self, computed_tokens: int) -> int:
        """How many leading blocks are final once ``computed_tokens`` are computed."""
        if computed_tokens >= self.num_tokens:
            return self.num_blocks
        return computed_tokens // self.block_size


def next_span(prompt: Prompt, watermark: int, computed_tokens: int) -> range:
    """Positions of the blocks to push now; the new watermark is its ``stop``. May be empty.

    Recomputation after a preemption moves ``computed_tokens`` back but never the watermark.
    """
    start = max(watermark, prompt.first_block)
    return range(start, max(start, prompt.complete_blocks(computed_tokens)))
