"""Decides which prefill rank brings together which heads of which tokens, so that decode's blocks leave in one piece.

A token-major block holds ``[token][head][cell]``. With unequal TP a decode rank's bytes of one token are spread over
several prefill ranks, or are only a part of one rank's. So the prefill ranks first exchange heads, and then each
writes whole tokens.

    prefill rank 0  heads 0..3 of stripes 0 1 2 3        owner 0: all heads of stripes 0 2 --> decode rank 0
    prefill rank 1  heads 4..7 of stripes 0 1 2 3   ==>  owner 1: all heads of stripes 1 3 --> decode rank 0

The *contributors* of a decode rank are the prefill ranks that push a head to it. Contributor ``i`` of ``n`` *owns*
the pieces of a prompt whose stripe number (first position // ``stripe_tokens``) is ``i`` modulo ``n``: the owner
writes them, and the other contributors *supply* it with their heads. A *piece* has the tokens of the smaller page,
which lie side by side on both engines.

Every rank plans from the step's metadata alone. All ranks have the same metadata, so all plan the same exchange
without a message. ``rounds.py`` turns these facts into the plan of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np

from pdcluster_connector.core.ranges import NULL_BLOCK, Offsets, blocks_at
from pdcluster_connector.core.tp_mapping import Sharding, plan_pushes
from pdcluster_protocol.ids import RequestId


@dataclass(frozen=True, slots=True)
class TokenPages:
    """Where the tokens of one rank's region lie, in bytes and tokens. Strides may include padding."""

    page_tokens: int
    pages_per_block: int
    token_bytes: int
    """Bytes of one token in all heads of the rank."""
    page_stride: int
    block_stride: int

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.page_tokens * self.pages_per_block

    def offsets(self, blocks: Offsets, tokens: Offsets) -> Offsets:
        """For each block and the token position in it: where the token begins, in bytes from the region's start."""
        inside = tokens % self.block_tokens
        page, token = np.divmod(inside, self.page_tokens)
        offsets: Offsets = blocks * self.block_stride + page * self.page_stride + token * self.token_bytes
        return offsets

    def blocks_at(self, tokens: Offsets, start: int, blocks: Sequence[int]) -> Offsets:
        """The block that holds each of ``tokens``; the first of ``blocks`` holds position ``start``."""
        return blocks_at(tokens, start, blocks, self.block_tokens)


@dataclass(frozen=True, slots=True)
class TokenShape:
    """One kind of region of a prefill rank: KV heads of the whole model, bytes of one head of one token, and pages."""

    kv_heads: int
    cell_bytes: int
    pages: TokenPages


@dataclass(frozen=True, slots=True)
class ReshardItem:
    """The tokens of one request in one KV group that this step completes. Part of the metadata that all ranks have.

    Positions ``[start, stop)``; readers round ``stop`` up to a whole unit (the smaller block). The first block of
    either table holds ``start``. ``piece_tokens``: tokens in the smaller of the two engines' pages. Tokens in decode's
    null block are left out.
    """

    request_id: RequestId
    decode_tp_size: int
    start: int
    stop: int
    prefill_blocks: Sequence[int]
    decode_blocks: Sequence[int]
    decode_block_tokens: int
    piece_tokens: int

    def wanted_tokens(self, prefill_block_tokens: int) -> Offsets:
        """First position of every piece that decode wants, ascending.

        Raises:
            ValueError: The block tables do not cover the positions, or pieces do not fit the blocks.
        """
        unit = min(prefill_block_tokens, self.decode_block_tokens)
        stop = -(-self.stop // unit) * unit
        self._require_fit(prefill_block_tokens, stop)
        tokens = np.arange(self.start, max(self.start, stop), self.piece_tokens, dtype=np.int64)
        blocks = blocks_at(tokens, self.start, self.decode_blocks, self.decode_block_tokens)
        wanted: Offsets = tokens[blocks != NULL_BLOCK]
        return wanted

    def _require_fit(self, prefill_block_tokens: int, stop: int) -> None:
        if self.start % self.piece_tokens or self.decode_block_tokens % self.piece_tokens:
            raise ValueError(
                f"request {self.request_id}: start {self.start} and decode blocks of {self.decode_block_tokens} tokens "
                f"are not whole pieces of {self.piece_tokens} tokens"
            )
        for blocks, size in (
            (self.prefill_blocks, prefill_block_tokens),
            (self.decode_blocks, self.decode_block_tokens),
        ):
            if stop > self.start and (self.start // size + len(blocks)) * size < stop:
                raise ValueError(f"request {self.request_id}: {len(blocks)} blocks of {size} tokens end before {stop}")


@dataclass(frozen=True, slots=True)
class Supply:
    """Adjacent heads (numbers of the whole model) that ``rank`` brings to an owner."""

    rank: int
    heads: range


@dataclass(frozen=True, slots=True)
class Feed:
    """How one decode rank gets its heads: the owners in order, and for each owner the ranks that supply it.

    ``supplies[i]``, for ``owners[i]``, covers ``heads`` once. An owner supplies itself with the heads that it holds.
    """

    decode_rank: int
    heads: range
    owners: tuple[int, ...]
    supplies: tuple[tuple[Supply, ...], ...]


def is_resharded(prefill_tp: int, decode_tp: int, kv_heads: int) -> bool:
    """Whether ranks of the two engines hold different numbers of heads; if not, blocks move as they are."""
    return min(prefill_tp, kv_heads) != min(decode_tp, kv_heads)


@lru_cache(maxsize=256)
def plan_feeds(prefill_tp: int, decode_tp: int, kv_heads: int) -> tuple[Feed, ...]:
    """The feed of every decode rank, in order of rank.

    8 heads, TP 2 to TP 1: decode rank 0 has owners 0 and 1. Owner 1 supplies owner 0 with heads 4..7 of the pieces of
    owner 0, and gets heads 0..3 of its own pieces.

    Raises:
        ValueError: The heads cannot be spread over one of the TP sizes.
    """
    prefill, decode = Sharding(prefill_tp, kv_heads), Sharding(decode_tp, kv_heads)
    writers: dict[int, set[int]] = {}
    for push in plan_pushes(prefill, decode):
        writers.setdefault(push.decode_rank, set()).add(push.prefill_rank)
    return tuple(_feed(prefill, decode, rank, sorted(writers[rank])) for rank in range(decode_tp))


def _feed(prefill: Sharding, decode: Sharding, decode_rank: int, owners: Sequence[int]) -> Feed:
    heads = decode.heads_of(decode_rank)
    supplies = tuple(_supplies(prefill, heads, owners, turn) for turn in range(len(owners)))
    return Feed(decode_rank, heads, tuple(owners), supplies)


def _supplies(prefill: Sharding, heads: range, owners: Sequence[int], turn: int) -> tuple[Supply, ...]:
    """The ranks that bring ``heads`` to owner number ``turn``. If several hold a head, each serves some owners."""

    def supplier(head: int) -> int:
        holders = [rank for rank in owners if rank in prefill.holders_of(head)]
        return owners[turn] if owners[turn] in holders else holders[turn % len(holders)]

    runs = ((rank, list(run)) for rank, run in groupby(heads, key=supplier))
    return tuple(Supply(rank, range(run[0], run[-1] + 1)) for rank, run in runs)
