"""All ranks of a prefill TP group simulated in numpy through the plans that each makes alone.

For random heads, TP sizes, blocks, pages, paddings, prompts and block tables: every decode rank ends with exactly the
bytes of a reference that copies token by token, each byte written once, and any two ranks agree on what they exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from fakes.token_major import (
    Bytes,
    DecodeRank,
    Pages,
    Wanted,
    blocks_for,
    prefill_memory,
    random_cells,
    rounded_stop,
    shape_of,
    with_null_prefix,
)
from pdcluster_connector.core.link import plan_link
from pdcluster_connector.core.ranges import GroupSlice, Offsets, wanted_bytes
from pdcluster_connector.core.tp_mapping import Sharding, stripe_tokens
from pdcluster_connector.reshard.feeds import (
    ReshardItem,
    TokenShape,
    is_resharded,
    plan_feeds,
)
from pdcluster_connector.reshard.rounds import GroupRank, RegionRound, Round, StagingPlace, plan_rounds
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout

NUM_BLOCKS = 400


def tp_sizes(kv_heads: int) -> st.SearchStrategy[int]:
    return st.sampled_from([tp for tp in range(1, 9) if kv_heads % tp == 0 or tp % kv_heads == 0])


@st.composite
def engines(draw: st.DrawFn) -> tuple[int, int, int]:
    """KV heads, prefill TP size, decode TP size."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    return kv_heads, draw(tp_sizes(kv_heads)), draw(tp_sizes(kv_heads))


@dataclass(frozen=True)
class Case:
    prefill_tp: int
    shapes: tuple[TokenShape, ...]
    wanted: tuple[tuple[Wanted, ...], ...]
    """Per region; the items are the same."""
    staging_bytes: int

    @property
    def items(self) -> list[ReshardItem]:
        return [want.item for want in self.wanted[0]]

    def rounds(self) -> list[tuple[Round, ...]]:
        """What each rank plans, by itself."""
        ranks = [GroupRank(rank, self.prefill_tp) for rank in range(self.prefill_tp)]
        return [plan_rounds(us, self.shapes, self.items, self.staging_bytes) for us in ranks]


def cells_of(item: ReshardItem, shape: TokenShape, prefill: Pages, seed: int) -> Bytes:
    return random_cells(seed, rounded_stop(item, prefill) - item.start, shape.kv_heads, shape.cell_bytes)


DECODE_PAGES = st.one_of(st.tuples(st.sampled_from([16, 64, 128]), st.sampled_from([1, 4])), st.just((512, 1)))
"""Tokens of a page, pages of a block."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    prefill_tp = draw(tp_sizes(kv_heads))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    prefill = draw(
        st.builds(Pages, st.sampled_from([16, 64, 128, 512]), st.sampled_from([1, 2]), st.sampled_from([0, 8]))
    )
    decodes = [
        (draw(tp_sizes(kv_heads)), Pages(*draw(DECODE_PAGES), padding))
        for padding in draw(st.sampled_from([(0,), (0, 0), (24,), (0, 24)]))
    ]
    items = []
    num_requests = draw(st.integers(1, 3))
    prefill_blocks, decode_blocks = (blocks_for(random, num_requests, 110) for _ in range(2))
    for number in range(num_requests):
        decode_tp, decode = draw(st.sampled_from(decodes))
        unit = min(prefill.block_tokens, decode.block_tokens)
        start = unit * draw(st.integers(0, 4))
        stop = start + draw(st.integers(0, 1200))
        tables = prefill_blocks[number], decode_blocks[number]
        piece = min(prefill.page_tokens, decode.page_tokens)
        item = ReshardItem(RequestId(f"r{number}"), decode_tp, start, stop, *tables, decode.block_tokens, piece)
        items.append((with_null_prefix(item, draw(st.sampled_from([0, 0, 1, 3]))), decode))
    # The layer's regions: K and V of one shape, or V with wider cells.
    shapes = tuple(
        shape_of(prefill, prefill_tp, kv_heads, cell) for cell in draw(st.sampled_from([(4,), (2, 2), (4, 6)]))
    )
    seeds = st.integers(0, 99)
    wanted = tuple(
        tuple(Wanted(item, cells_of(item, shape, prefill, draw(seeds)), decode) for item, decode in items)
        for shape in shapes
    )
    smallest_buffer = max(most_of_a_piece(item, prefill_tp, shapes) for item, _ in items)
    return Case(prefill_tp, shapes, wanted, draw(st.sampled_from([1, 3, 8, 10_000])) * max(smallest_buffer, 1))


def most_of_a_piece(item: ReshardItem, prefill_tp: int, shapes: tuple[TokenShape, ...]) -> int:
    """Bytes of one piece that one rank may have to stage."""
    kv_heads = shapes[0].kv_heads
    heads = sum(len(feed.heads) for feed in plan_feeds(prefill_tp, item.decode_tp_size, kv_heads))
    return item.piece_tokens * heads * sum(shape.cell_bytes for shape in shapes)


def gathered(exchange: RegionRound, region: Bytes, shape: TokenShape, num_heads: int) -> list[Bytes]:
    """For each peer, the bytes that go to it."""
    outgoing = [np.full(num_bytes, 0xAA, np.uint8) for num_bytes in exchange.sends]
    for gather in exchange.gathers:
        cells = cells_at(region, gather.pieces.sources, gather.pieces.piece_tokens, num_heads, shape.cell_bytes)
        data = np.ascontiguousarray(cells[:, :, gather.heads.start : gather.heads.stop]).ravel()
        outgoing[gather.peer][gather.offset : gather.offset + len(data)] = data
    return outgoing


def cells_at(region: Bytes, sources: Offsets, piece_tokens: int, num_heads: int, cell: int) -> Bytes:
    """[piece, token, head, byte]"""
    piece = np.arange(piece_tokens * num_heads * cell)
    cells: Bytes = region[sources[:, None] + piece].reshape(-1, piece_tokens, num_heads, cell)
    return cells


def fill(buffer: Bytes, place: StagingPlace, cells: Bytes) -> None:
    shape = (place.num_pieces, place.piece_tokens, place.num_heads, cells.shape[-1])
    slot = buffer[place.offset : place.offset + int(np.prod(shape))].reshape(shape)
    slot[:, :, place.heads.start : place.heads.stop] = cells


def staged(exchange: RegionRound, incoming: list[Bytes], region: Bytes, shape: TokenShape, num_heads: int) -> Bytes:
    buffer = np.full(exchange.staged_bytes, 0xBB, np.uint8)
    cell = shape.cell_bytes
    for landing in exchange.landings:
        sizes = (landing.place.num_pieces, landing.place.piece_tokens, len(landing.place.heads), cell)
        data = incoming[landing.peer][landing.offset : landing.offset + int(np.prod(sizes))]
        fill(buffer, landing.place, data.reshape(sizes))
    for copy in exchange.copies:
        cells = cells_at(region, copy.pieces.sources, copy.pieces.piece_tokens, num_heads, cell)
        fill(buffer, copy.place, cells[:, :, copy.heads.start : copy.heads.stop])
    return buffer


def engine_of(want: Wanted) -> tuple[int, Pages]:
    """Engines with different pages are different engines."""
    return want.item.decode_tp_size, want.decode


def decode_ranks(case: Case, index: int) -> dict[tuple[int, Pages, int], DecodeRank]:
    shape = case.shapes[index]
    return {
        (*engine_of(want), rank): DecodeRank.empty(want, shape, rank, NUM_BLOCKS)
        for want in case.wanted[index]
        for rank in range(want.item.decode_tp_size)
        if is_resharded(case.prefill_tp, want.item.decode_tp_size, shape.kv_heads)
    }


@settings(max_examples=drawn(150), deadline=None)
@given(cases())
def test_every_decode_rank_gets_exactly_the_bytes_of_a_reference_reshard_each_once(case: Case) -> None:
    planned = case.rounds()
    for index, shape in enumerate(case.shapes):
        wanted = case.wanted[index]
        num_heads = len(Sharding(case.prefill_tp, shape.kv_heads).heads_of(0))
        regions = [prefill_memory(rank, case.prefill_tp, shape, wanted, NUM_BLOCKS) for rank in range(case.prefill_tp)]
        decodes = decode_ranks(case, index)
        for shares in zip(*([turn.regions[index] for turn in rounds] for rounds in planned), strict=True):
            sent = [gathered(e, region, shape, num_heads) for e, region in zip(shares, regions, strict=True)]
            for rank, exchange in enumerate(shares):
                buffer = staged(exchange, [data[rank] for data in sent], regions[rank], shape, num_heads)
                for part in exchange.parts:
                    decode = decodes[(*engine_of(wanted[part.item]), part.decode_rank)]
                    decode.write(part, wanted[part.item].item, buffer)
        for (*engine, _), decode in decodes.items():
            theirs = [want for want in wanted if engine_of(want) == tuple(engine)]
            data, writes = decode.expected(theirs, shape.kv_heads)
            assert (decode.writes == writes).all()
            assert (decode.data == data).all()


@settings(max_examples=drawn(150), deadline=None)
@given(cases())
def test_any_two_ranks_agree_on_every_split_and_on_whether_to_meet(case: Case) -> None:
    planned = case.rounds()
    assert len({len(rounds) for rounds in planned}) == 1
    for turns in zip(*planned, strict=True):
        assert len({turn.travels for turn in turns}) == 1
        for regions in zip(*(turn.regions for turn in turns), strict=True):
            for sender, theirs in enumerate(regions):
                assert theirs.sends[sender] == theirs.receives[sender] == 0
                assert [theirs.sends[receiver] for receiver in range(case.prefill_tp)] == [
                    exchange.receives[sender] for exchange in regions
                ]
        assert turns[0].travels == any(sum(e.sends) for turn in turns for e in turn.regions)


@settings(max_examples=drawn(150), deadline=None)
@given(cases())
def test_a_rank_stages_the_pieces_of_its_stripes_and_no_more_than_its_buffer(case: Case) -> None:
    for rank, rounds in enumerate(case.rounds()):
        for turn in rounds:
            assert turn.staged_bytes <= case.staging_bytes
            for shape, exchange in zip(case.shapes, turn.regions, strict=True):
                for part in exchange.parts:
                    decode_tp = case.items[part.item].decode_tp_size
                    owners = plan_feeds(case.prefill_tp, decode_tp, shape.kv_heads)[part.decode_rank].owners
                    stripes = part.tokens // stripe_tokens(case.items[part.item].piece_tokens)
                    assert (stripes % len(owners) == owners.index(rank)).all()


@given(engines())
def test_every_head_of_a_decode_rank_has_one_supplier_that_holds_it(sizes: tuple[int, int, int]) -> None:
    kv_heads, prefill_tp, decode_tp = sizes
    prefill, decode = Sharding(prefill_tp, kv_heads), Sharding(decode_tp, kv_heads)
    for feed in plan_feeds(prefill_tp, decode_tp, kv_heads):
        assert list(feed.owners) == sorted(set(feed.owners))
        for owner, supplies in zip(feed.owners, feed.supplies, strict=True):
            assert [head for supply in supplies for head in supply.heads] == list(decode.heads_of(feed.decode_rank))
            for supply in supplies:
                assert set(supply.heads) <= set(prefill.heads_of(supply.rank))
                assert supply.rank in feed.owners
            own = set(prefill.heads_of(owner)) & set(feed.heads)
            assert own <= {head for supply in supplies if supply.rank == owner for head in supply.heads}
        asked = [supply.rank for supplies in feed.supplies for supply in supplies]
        turns = [asked.count(owner) for owner in feed.owners]
        assert max(turns) - min(turns) <= 1, "replicas take turns"


@given(engines(), st.sampled_from([64, 96, 512, 528]))
def test_over_whole_cycles_of_stripes_every_contributor_stages_the_same(
    sizes: tuple[int, int, int], page_tokens: int
) -> None:
    kv_heads, prefill_tp, decode_tp = sizes
    tokens = stripe_tokens(page_tokens) * 840
    blocks = range(1, 1 + tokens // page_tokens)
    item = ReshardItem(RequestId("r"), decode_tp, 0, tokens, blocks, blocks, page_tokens, page_tokens)
    shape = shape_of(Pages(page_tokens), prefill_tp, kv_heads, 2)
    staged_bytes: dict[int, set[int]] = {}
    for rank in range(prefill_tp):
        for turn in plan_rounds(GroupRank(rank, prefill_tp), [shape], [item], 1 << 40):
            for part in turn.regions[0].parts:
                staged_bytes.setdefault(part.decode_rank, set()).add(part.num_bytes)
    assert all(len(amounts) == 1 for amounts in staged_bytes.values())
    assert len(staged_bytes) == (decode_tp if is_resharded(prefill_tp, decode_tp, kv_heads) else 0)


def layout(tp_size: int, rank: int, kv_heads: int, pages: Pages) -> RankLayout:
    page_bytes = pages.page_tokens * len(Sharding(tp_size, kv_heads).heads_of(rank)) * 2
    kind = (RegionKind.TOKENS, kv_heads, pages.page_tokens, pages.pages_per_block)
    return RankLayout(rank, tp_size, (RegionLayout("k", 0, 0, 99, page_bytes, page_bytes, *kind),))


PAGES = st.sampled_from(
    [(16, 64), (64, 128), (128, 16), (128, 64), (128, 128), (512, 64), (512, 128), (96, 192), (512, 1024), (528, 528)]
)
"""Tokens of a page of prefill and of decode."""


@given(engines(), PAGES, st.integers(0, 4), st.integers(1, 2000))
def test_a_rank_stages_for_a_decode_rank_as_many_bytes_as_their_link_owes(
    sizes: tuple[int, int, int], page_tokens: tuple[int, int], first_unit: int, num_tokens: int
) -> None:
    kv_heads, prefill_tp, decode_tp = sizes
    prefill, decode = Pages(page_tokens[0]), Pages(page_tokens[1], 2)
    start = first_unit * min(prefill.block_tokens, decode.block_tokens)
    blocks, piece = range(1, 200), min(page_tokens)
    item = ReshardItem(RequestId("r"), decode_tp, start, start + num_tokens, blocks, blocks, decode.block_tokens, piece)
    for rank in range(prefill_tp):
        ours = layout(prefill_tp, rank, kv_heads, prefill)
        rounds = plan_rounds(GroupRank(rank, prefill_tp), [shape_of(prefill, prefill_tp, kv_heads, 2)], [item], 1 << 40)
        parts = [part for turn in rounds for part in turn.regions[0].parts]
        for decode_rank in range(decode_tp):
            link = plan_link(ours, layout(decode_tp, decode_rank, kv_heads, decode))
            owed = link.owed_bytes([[(start, start + num_tokens)]]) if any(c.is_resharded for c in link.copies) else 0
            assert sum(part.num_bytes for part in parts if part.decode_rank == decode_rank) == owed


@given(engines(), PAGES, st.integers(0, 3), st.integers(1, 2000))
def test_a_push_plans_as_many_bytes_as_are_staged_for_it_also_outside_of_a_window(
    sizes: tuple[int, int, int], page_tokens: tuple[int, int], num_null: int, num_tokens: int
) -> None:
    """A push is done when all that it planned is written: a byte more or less and it never ends, or too early."""
    kv_heads, prefill_tp, decode_tp = sizes
    prefill, decode = Pages(page_tokens[0]), Pages(page_tokens[1], 2)
    whole, block = list(range(1, 200)), decode.block_tokens
    item = with_null_prefix(
        ReshardItem(RequestId("r"), decode_tp, 0, num_tokens, whole, whole, block, min(page_tokens)), num_null
    )
    piece = GroupSlice(0, num_tokens, item.prefill_blocks, item.decode_blocks)
    shapes = [shape_of(prefill, prefill_tp, kv_heads, 2)]
    for rank in range(prefill_tp):
        ours = layout(prefill_tp, rank, kv_heads, prefill)
        rounds = plan_rounds(GroupRank(rank, prefill_tp), shapes, [item], 1 << 40)
        parts = [part for turn in rounds for part in turn.regions[0].parts]
        for decode_rank in range(decode_tp):
            link = plan_link(ours, layout(decode_tp, decode_rank, kv_heads, decode))
            planned = sum(wanted_bytes(link.shapes[copy.shape], piece) for copy in link.copies if copy.is_resharded)
            assert sum(part.num_bytes for part in parts if part.decode_rank == decode_rank) == planned
