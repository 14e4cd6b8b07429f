"""The law of shares: whoever holds the same bytes as others pushes its part of them, and no one much more than another.

For random engines, kinds of KV, sizes of page and spans: every piece of the span has one pusher, and two pushers of a
decode rank's heads are never more than one stripe apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_connector.core.link import plan_link
from pdcluster_connector.core.ranges import CopyShape, Offsets, TokenSpan, piece_tokens
from pdcluster_connector.core.tp_mapping import STRIPE_TOKENS, Sharding
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout


@dataclass(frozen=True, slots=True)
class Replicas:
    """Two engines with one layer, and a span of a prompt. ``page_tokens``: of prefill and of decode."""

    kind: RegionKind
    kv_heads: int
    tp_sizes: tuple[int, int]
    page_tokens: tuple[int, int]
    span: TokenSpan

    def _rank(self, side: int, tp_rank: int) -> RankLayout:
        tp_size, tokens = self.tp_sizes[side], self.page_tokens[side]
        size = tokens * len(Sharding(tp_size, self.kv_heads).heads_of(tp_rank))
        return RankLayout(tp_rank, tp_size, (RegionLayout("a", 0, 0, 9, size, size, self.kind, self.kv_heads, tokens),))

    def pushers(self, decode_rank: int) -> list[list[CopyShape]]:
        """For each run of heads of the decode rank, what each prefill rank that shares it does."""
        runs: dict[int, list[CopyShape]] = {}
        for prefill_rank in range(self.tp_sizes[0]):
            for shape in plan_link(self._rank(0, prefill_rank), self._rank(1, decode_rank)).shapes:
                runs.setdefault(shape.target.offset, []).append(shape)
        return list(runs.values())


@st.composite
def replicas(draw: st.DrawFn) -> Replicas:
    kind = draw(st.sampled_from([RegionKind.HEADS, RegionKind.LATENT, RegionKind.TOKENS]))
    kv_heads = 1 if kind is RegionKind.LATENT else draw(st.sampled_from([1, 2, 3, 4, 6]))
    tps = st.sampled_from([tp for tp in range(1, 13) if kv_heads % tp == 0 or tp % kv_heads == 0])
    page = draw(st.sampled_from([16, 48, 96, 128, 200, 256, 512, 528, 1024, 1536]))
    sides = draw(st.sampled_from([(1, 1), (1, 2), (3, 1), (1, 8)]))
    start = page * min(sides) * draw(st.integers(0, 40))
    span = start, start + draw(st.integers(1, 40_000))
    return Replicas(kind, kv_heads, (draw(tps), draw(tps)), (page * sides[0], page * sides[1]), span)


def dealt(shapes: list[CopyShape], span: TokenSpan) -> list[Offsets]:
    """First positions of the pieces that each of ``shapes`` pushes."""
    return [piece_tokens(shape, span) for shape in shapes]


@given(replicas())
def test_every_piece_has_exactly_one_pusher(engines: Replicas) -> None:
    start, stop = engines.span
    unit = min(engines.page_tokens)
    every = np.arange(start, -(-stop // unit) * unit, unit)
    for decode_rank in range(engines.tp_sizes[1]):
        for shapes in engines.pushers(decode_rank):
            assert np.array_equal(np.sort(np.concatenate(dealt(shapes, engines.span))), every)


@given(replicas())
def test_no_pusher_has_more_than_one_stripe_more_than_another(engines: Replicas) -> None:
    unit = min(engines.page_tokens)
    for decode_rank in range(engines.tp_sizes[1]):
        for shapes in engines.pushers(decode_rank):
            tokens = [len(pieces) * unit for pieces in dealt(shapes, engines.span)]
            assert max(tokens) - min(tokens) <= max(STRIPE_TOKENS, unit)
