"""The part of a prompt that this step completes, for each KV group.

A *unit* is pushed once, whole, in the step in which its last token is scheduled. A unit that the prompt only partly
fills is pushed when the prompt is complete, and so is state (Mamba, GDN). Tokens below the watermark were pushed in an
earlier step, or are in decode's prefix cache.

    prompt of 300 tokens, units of 128, decode has the first 128, chunks of 100:
      step 1 -> 100 computed: nothing     step 3 -> 300 computed: tokens 128..299
      step 2 -> 200 computed: nothing     (the unit from 128 is complete at 256: also in step 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdcluster_connector.core.ranges import NULL_BLOCK, GroupSlice, TokenSpan


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One KV cache group of an engine.

    ``block_tokens``: tokens in a block; 1 for state. ``state_every``: where vLLM's block table has a prompt's state:
    the state after n tokens is in block (n - 1) // state_every (mode align); 0: in the first block (mode none).
    """

    block_tokens: int
    is_state: bool = False
    state_every: int = 0
    is_windowed: bool = False
    """Whether a token reads only a window of the last tokens, and vLLM frees the blocks before the window."""

    def held_blocks(self, num_tokens: int, blocks: Sequence[int]) -> Sequence[int]:
        """The part of a request's ``blocks`` that holds its first ``num_tokens`` tokens, or the state after them."""
        if not self.is_state:
            return blocks[: num_blocks(self, num_tokens)]
        index = (num_tokens - 1) // self.state_every if self.state_every else 0
        return blocks[index : index + 1]


def held_table(groups: Sequence[KvGroup], num_tokens: int, table: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """``held_blocks`` of each group, from the request's block ``table``."""
    return [group.held_blocks(num_tokens, blocks) for group, blocks in zip(groups, table, strict=True)]


def num_kept_back(groups: Sequence[KvGroup]) -> int:
    """How many tokens at a prompt's end prefill leaves out: 0, or 1, since decode computes the last token itself.

    To compute the last token, decode needs the state before it. With a window vLLM 0.32 frees the blocks that the token
    *after* the computed ones does not read. If prefill computed all P tokens, vLLM would free the block that ends at
    P - window, which token P - 1 still reads.
    """
    return int(any(group.is_state or group.is_windowed for group in groups))


@dataclass(frozen=True, slots=True)
class GroupPair:
    """One KV group on both engines, where one block size divides the other."""

    prefill: KvGroup
    decode: KvGroup

    def __post_init__(self) -> None:
        small, large = sorted((self.prefill.block_tokens, self.decode.block_tokens))
        if self.prefill.is_state != self.decode.is_state:
            raise ValueError("a KV group holds recurrent state on one engine only")
        if small < 1 or large % small:
            raise ValueError(f"block sizes {self.prefill.block_tokens} and {self.decode.block_tokens} do not divide")

    @property
    def unit(self) -> int:
        """A push that ends before the prompt ends has whole multiples of so many tokens."""
        return min(self.prefill.block_tokens, self.decode.block_tokens)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as both engines see it. ``cached_tokens``: how many of its first tokens decode has in its prefix
    cache; whole units of every group."""

    num_tokens: int
    cached_tokens: int
    groups: tuple[GroupPair, ...]

    def __post_init__(self) -> None:
        if cut := [pair.unit for pair in self.groups if self.cached_tokens % pair.unit]:
            raise ValueError(f"{self.cached_tokens} cached tokens do not end on a block of {cut[0]} tokens")
        if not 0 <= self.cached_tokens < self.num_tokens:
            raise ValueError(f"{self.cached_tokens} cached tokens of a prompt of {self.num_tokens}")

    def next_span(self, number: int, watermark: int, computed_tokens: int) -> TokenSpan:
        """Positions of group ``number`` to push now, perhaps none. The span's end is the new watermark. State counts as
        one position.

        Recomputation after a preemption moves ``computed_tokens`` back but never the watermark.
        """
        pair, is_whole = self.groups[number], computed_tokens >= self.num_tokens
        if pair.prefill.is_state:
            return min(watermark, 1), int(is_whole)
        start = max(watermark, self.cached_tokens)
        complete = self.num_tokens if is_whole else computed_tokens // pair.unit * pair.unit
        return start, max(start, complete)


def slice_of(pair: GroupPair, span: TokenSpan, prefill: Sequence[int], decode: Sequence[int]) -> GroupSlice:
    """``span`` with its blocks. ``prefill``, ``decode``: the blocks that each engine has of the prompt
    (``held_blocks``)."""
    return GroupSlice(*span, _covering(pair.prefill, span, prefill), _covering(pair.decode, span, decode))


def wanted_spans(group: KvGroup, first_token: int, num_tokens: int, blocks: Sequence[int]) -> tuple[TokenSpan, ...]:
    """Positions from ``first_token`` on whose block in decode's table is not the null block."""
    if group.is_state:
        return ((0, 1),)
    size = group.block_tokens
    spans: list[TokenSpan] = []
    for number in range(first_token // size, -(-num_tokens // size)):
        start, stop = max(number * size, first_token), min((number + 1) * size, num_tokens)
        if blocks[number] == NULL_BLOCK:
            continue
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, stop))
    return tuple(spans)


def num_blocks(group: KvGroup, num_tokens: int) -> int:
    """How many blocks hold ``num_tokens``. The last block may be partly filled."""
    return 1 if group.is_state else -(-num_tokens // group.block_tokens)


def _covering(group: KvGroup, span: TokenSpan, blocks: Sequence[int]) -> tuple[int, ...]:
    start, stop = span
    return tuple(blocks[start // group.block_tokens : -(-stop // group.block_tokens)])
