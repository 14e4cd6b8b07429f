"""Known answers of the resharder's core: who owns, who supplies, how rounds are cut and ranges joined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.token_major import Pages, shape_of
from pdcluster_connector.reshard.feeds import ReshardItem, Supply, is_resharded, plan_feeds
from pdcluster_connector.reshard.rounds import GroupRank, Round, StagedPart, plan_rounds, write_rows
from pdcluster_connector.reshard.staging import SpanPool
from pdcluster_protocol.ids import RequestId

PLENTY = 1 << 30


def item(stop: int, *, start: int = 0, decode_tp: int = 1, blocks: list[int] | None = None) -> ReshardItem:
    """Blocks and pages of 128 tokens on both sides, numbered from 1 unless ``blocks`` says otherwise."""
    first, last = start // 128, -(-stop // 128)
    table = list(range(first + 1, last + 1))
    return ReshardItem(RequestId("r"), decode_tp, start, stop, table, table if blocks is None else blocks, 128, 128)


def rounds(rank: int, tp_size: int, items: list[ReshardItem], staging_bytes: int = PLENTY) -> tuple[Round, ...]:
    """8 KV heads of 2 bytes."""
    return plan_rounds(GroupRank(rank, tp_size), [shape_of(Pages(128), tp_size, 8, 2)], items, staging_bytes)


def test_from_tp_2_to_1_each_rank_supplies_the_other_with_half_the_heads() -> None:
    (feed,) = plan_feeds(2, 1, 8)
    assert feed.owners == (0, 1)
    assert feed.supplies == ((Supply(0, range(4)), Supply(1, range(4, 8))),) * 2


def test_six_heads_from_tp_3_to_2_meet_in_the_middle_rank() -> None:
    assert [feed.owners for feed in plan_feeds(3, 2, 6)] == [(0, 1), (1, 2)]
    assert plan_feeds(3, 2, 6)[1].supplies[0] == (Supply(1, range(3, 4)), Supply(2, range(4, 6)))


def test_from_tp_2_to_4_each_decode_rank_has_one_contributor_and_nothing_travels() -> None:
    assert [feed.owners for feed in plan_feeds(2, 4, 8)] == [(0,), (0,), (1,), (1,)]
    (turn,) = rounds(0, 2, [item(1000, decode_tp=4)])
    assert not turn.travels
    assert turn.regions[0].sends == (0, 0)
    assert turn.staged_bytes == 1024 * 4 * 2


@pytest.mark.parametrize(
    ("rank", "sent", "copied", "landed"),
    [
        pytest.param(0, [(1, range(2))], [(0, range(2), range(2))], [(0, 1, range(2, 3))], id="rank 0 holds 0 and 1"),
        pytest.param(
            1,
            [(0, range(1)), (2, range(1, 2))],
            [(0, range(1), range(2, 3)), (1, range(1, 2), range(1))],
            [(0, 0, range(2)), (1, 2, range(1, 3))],
            id="rank 1 holds 2 and 3",
        ),
        pytest.param(2, [(1, range(2))], [(1, range(2), range(1, 3))], [(1, 1, range(1))], id="rank 2 holds 4 and 5"),
    ],
)
def test_six_heads_from_tp_3_to_2_are_counted_from_each_ranks_own_first(
    rank: int,
    sent: list[tuple[int, range]],
    copied: list[tuple[int, range, range]],
    landed: list[tuple[int, int, range]],
) -> None:
    """Decode rank 0 has heads 0..2, and rank 1 has 3..5. Two stripes: each contributor owns one of them.

    ``sent``: (to, heads of ours). ``copied``: (decode rank, heads of ours, heads of decode's). ``landed``: (decode
    rank, from, heads of decode's).
    """
    (turn,) = plan_rounds(GroupRank(rank, 3), [shape_of(Pages(128), 3, 6, 2)], [item(512, decode_tp=2)], PLENTY)
    (exchange,) = turn.regions
    decode_rank_at = {part.offset: part.decode_rank for part in exchange.parts}
    assert [(gather.peer, gather.heads) for gather in exchange.gathers] == sent
    assert [(decode_rank_at[copy.place.offset], copy.heads, copy.place.heads) for copy in exchange.copies] == copied
    assert [(decode_rank_at[land.place.offset], land.peer, land.place.heads) for land in exchange.landings] == landed


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "kv_heads", "expected"),
    [(4, 2, 8, True), (2, 2, 8, False), (8, 4, 2, False), (8, 2, 4, True), (2, 4, 2, False), (4, 8, 1, False)],
)
def test_only_ranks_that_hold_different_runs_of_heads_are_resharded(
    prefill_tp: int, decode_tp: int, kv_heads: int, expected: bool
) -> None:
    assert is_resharded(prefill_tp, decode_tp, kv_heads) is expected


def test_two_contributors_own_alternate_stripes_by_absolute_position() -> None:
    (turn,) = rounds(0, 2, [item(1024, start=384)])
    (part,) = turn.regions[0].parts
    assert part.tokens.tolist() == [512, 640]
    (turn,) = rounds(1, 2, [item(1024, start=384)])
    (part,) = turn.regions[0].parts
    assert part.tokens.tolist() == [384, 768, 896]


def test_two_contributors_take_turns_with_pages_larger_than_a_stripe() -> None:
    table = list(range(1, 6))
    whole = ReshardItem(RequestId("r"), 1, 0, 2560, table, table, 512, 512)
    dealt = []
    for rank in range(2):
        shape = shape_of(Pages(512), 2, 8, 2)
        cut = plan_rounds(GroupRank(rank, 2), [shape], [whole], 2 * 512 * 8 * 2)
        dealt.append([part.tokens.tolist() for turn in cut for part in turn.regions[0].parts])
    assert dealt == [[[0, 1024], [2048]], [[512, 1536]]]


def test_a_short_prompt_has_one_owner_and_the_others_only_supply() -> None:
    (turn,) = rounds(1, 2, [item(100)])
    assert turn.travels
    assert turn.regions[0].sends == (128 * 4 * 2, 0)
    assert turn.regions[0].parts == ()
    assert turn.staged_bytes == 0


@pytest.mark.parametrize("items", [[], [item(0)], [item(300, blocks=[0, 0, 0])]], ids=["none", "empty", "null blocks"])
def test_without_a_wanted_piece_there_is_no_round(items: list[ReshardItem]) -> None:
    assert rounds(0, 2, items) == ()


def test_equal_tp_beside_unequal_tp_stages_only_the_unequal() -> None:
    (turn,) = rounds(0, 2, [item(256, decode_tp=2), item(256)])
    assert [part.item for part in turn.regions[0].parts] == [1]


def test_a_small_buffer_cuts_the_layer_into_rounds_that_each_fit() -> None:
    piece_bytes = 128 * 8 * 2
    cut = rounds(0, 2, [item(2048)], staging_bytes=2 * piece_bytes)
    assert [turn.staged_bytes for turn in cut] == [2 * piece_bytes] * 4
    staged = [part.tokens.tolist() for turn in cut for part in turn.regions[0].parts]
    assert staged == [[0, 128], [512, 640], [1024, 1152], [1536, 1664]]


def test_a_buffer_smaller_than_a_piece_is_refused_with_both_values() -> None:
    with pytest.raises(ValueError, match=r"one piece of 2048 bytes does not fit staging memory of 2047 bytes"):
        rounds(0, 2, [item(100)], staging_bytes=2047)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (ReshardItem(RequestId("r"), 1, 0, 300, [1, 2], [1, 2, 3], 128, 128), "2 blocks of 128 tokens end before 384"),
        (ReshardItem(RequestId("r"), 1, 0, 300, [1, 2, 3], [1, 2], 128, 128), "2 blocks of 128 tokens end before 384"),
        (ReshardItem(RequestId("r"), 1, 64, 300, [1, 2, 3], [1, 2, 3], 128, 128), "start 64 .* are not whole pieces"),
        (
            ReshardItem(RequestId("r"), 1, 0, 300, [1, 2, 3], [1, 2], 256, 256),
            "pages of 128 .* not whole pieces of 256",
        ),
    ],
)
def test_an_item_that_does_not_fit_its_blocks_is_refused(wrong: ReshardItem, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rounds(0, 2, [wrong])


@pytest.mark.parametrize(
    ("pages", "blocks", "expected"),
    [
        pytest.param(Pages(128), [5, 6, 9], [(64, 10240, 4096), (4160, 18432, 2048)], id="adjacent blocks are one"),
        pytest.param(Pages(128, 2), [3, 7], [(64, 12288, 4096), (4160, 28672, 2048)], id="two pages are one"),
        pytest.param(
            Pages(128, 2, 8), [3, 7], [(64, 12360, 2048), (2112, 14416, 2048), (4160, 28840, 2048)], id="padded are not"
        ),
    ],
)
def test_pieces_that_are_adjacent_on_decode_leave_in_one_range(
    pages: Pages, blocks: list[int], expected: list[tuple[int, int, int]]
) -> None:
    part = StagedPart(0, 0, np.array([0, 128, 256]), 64, 2048)
    whole = ReshardItem(RequestId("r"), 1, 0, 384, [1, 2, 3], blocks, pages.block_tokens, 128)
    rows = write_rows(part, whole, pages.of(8, 2))
    assert list(zip(rows.source.tolist(), rows.target.tolist(), rows.num_bytes.tolist(), strict=True)) == expected


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700), st.integers(0, 99)), max_size=80))
def test_buffers_never_overlap_and_all_come_back(moves: list[tuple[bool, int, int]]) -> None:
    pool = SpanPool(2100)
    taken: dict[int, int] = {}
    for is_take, num_bytes, choice in moves:
        if is_take and (start := pool.take(num_bytes)) is not None:
            assert start % 64 == 0
            assert start + num_bytes <= 2048
            assert all(start + num_bytes <= other or other + size <= start for other, size in taken.items())
            taken[start] = num_bytes
        elif not is_take and taken:
            given_back = sorted(taken)[choice % len(taken)]
            del taken[given_back]
            pool.give_back(given_back)
    for start in taken:
        pool.give_back(start)
    assert pool.is_idle
    assert pool.take(2048) == 0


def test_a_buffer_that_was_not_taken_cannot_come_back() -> None:
    pool = SpanPool(1024)
    with pytest.raises(KeyError):
        pool.give_back(0)
