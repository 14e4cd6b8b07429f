"""What two ranks cannot share is refused with both values and the cure; the law of what they can is a property."""

from __future__ import annotations

import msgspec
import pytest

from pdcluster_connector.core.link import full_coverage, owed_by, plan_link, require_possible
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout, StateRun

PLAIN = RegionLayout("a", 0, 0, 9, 64, 64, RegionKind.HEADS, 4)
STATE = RegionLayout("s", 1, 0, 9, 64, 60, RegionKind.STATE, 1, 1)


def rank(*regions: RegionLayout, tp_rank: int = 0, tp_size: int = 1) -> RankLayout:
    return RankLayout(tp_rank, tp_size, regions)


def changed(region: RegionLayout, **fields: object) -> RegionLayout:
    return msgspec.structs.replace(region, **fields)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (PLAIN, changed(PLAIN, layer_name="b"), ["a[0] of group 0, b[0] of group 0", "serve one model"]),
        (PLAIN, changed(PLAIN, group=1), ["a[0] of group 0, a[0] of group 1"]),
        (
            PLAIN,
            changed(PLAIN, page_bytes=128),
            ["layer a", "1 bytes a token on prefill, 2 on decode"],
        ),
        (PLAIN, changed(PLAIN, heads=2), ["heads KV of 4 heads on prefill, heads KV of 2 heads on decode"]),
        (PLAIN, changed(PLAIN, kind=RegionKind.TOKENS), ["heads KV of 4 heads", "tokens KV of 4 heads", "backend"]),
        (
            PLAIN,
            changed(PLAIN, page_tokens=24, page_bytes=96),
            ["--block-size 16 on prefill, 24 on decode", "divide the other"],
        ),
        (
            PLAIN,
            changed(PLAIN, page_tokens=32, page_bytes=128, is_linear=False),
            ["pages of 16 tokens on prefill, 32 on decode", "same --block-size"],
        ),
        (PLAIN, changed(PLAIN, page_bytes=63), ["pages of 63 bytes for 64 cells"]),
        (STATE, changed(STATE, page_bytes=61), ["60 bytes of state on prefill, 61 on decode"]),
    ],
)
def test_regions_that_differ_are_refused(ours: RegionLayout, theirs: RegionLayout, words: list[str]) -> None:
    with pytest.raises(ProtocolError) as refused:
        plan_link(rank(ours), rank(theirs))
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize("step", [1, 48], ids=["sliding window", "chunks that end within decode's blocks"])
def test_larger_blocks_on_decode_are_refused_where_prefill_may_lack_the_beginning_of_one(step: int) -> None:
    ours, theirs = changed(PLAIN, window_step=step), changed(PLAIN, pages_per_block=2, window_step=step)
    with pytest.raises(ProtocolError) as refused:
        plan_link(rank(ours), rank(theirs))
    words = ["layer a", "blocks of 16 tokens on prefill, 32 on decode", "same --block-size"]
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(changed(PLAIN, window_step=1), changed(PLAIN, window_step=1), id="blocks of one size"),
        pytest.param(changed(PLAIN, window_step=1, pages_per_block=2), PLAIN, id="smaller blocks on decode"),
        pytest.param(changed(PLAIN, window_step=64), changed(PLAIN, pages_per_block=2), id="chunks of whole blocks"),
        pytest.param(PLAIN, changed(PLAIN, pages_per_block=2, window_step=1), id="no window on prefill"),
    ],
)
def test_windows_of_which_prefill_has_every_block_are_pushed(ours: RegionLayout, theirs: RegionLayout) -> None:
    assert plan_link(rank(ours), rank(theirs)).owed_bytes([[(32, 64)]]) == 2 * 64


@pytest.mark.parametrize(
    ("prefill", "decode", "source", "target", "num_rows"),
    [
        pytest.param((1, 2), (0, 1), 0, 4, 4, id="the second half of the heads, TP 2 to 1"),
        pytest.param((0, 1), (1, 2), 4, 0, 4, id="the second half of the heads, TP 1 to 2"),
        pytest.param((1, 2), (3, 4), 2, 0, 2, id="heads 6 and 7, TP 2 to 4"),
        pytest.param((3, 4), (1, 2), 0, 2, 2, id="heads 6 and 7, TP 4 to 2"),
        pytest.param((5, 16), (1, 4), 0, 0, 1, id="head 2, which two ranks hold, to 2 and 3"),
        pytest.param((7, 16), (1, 4), 0, 1, 1, id="head 3, which two ranks hold, to 2 and 3"),
    ],
)
def test_heads_are_counted_from_each_ranks_own_first(
    prefill: tuple[int, int], decode: tuple[int, int], source: int, target: int, num_rows: int
) -> None:
    """8 heads of 16 tokens of 1 byte: a head is a row of 16 bytes. ``prefill``, ``decode``: rank and TP size."""

    def of(tp_rank: int, tp_size: int) -> RankLayout:
        page = max(1, 8 // tp_size) * 16
        eight = changed(PLAIN, heads=8, page_stride=page, page_bytes=page)
        return rank(eight, tp_rank=tp_rank, tp_size=tp_size)

    (shape,) = plan_link(of(*prefill), of(*decode)).shapes
    assert (shape.source.offset, shape.target.offset) == (source * 16, target * 16)
    assert shape.piece_bytes == num_rows * 16


def test_a_draft_model_that_prefill_lacks_is_not_owed_and_one_that_it_has_is() -> None:
    guess = changed(PLAIN, layer_name="draft", heads=2, page_stride=32, page_bytes=32, is_draft=True)
    decode = rank(PLAIN, guess)
    alone, both = plan_link(rank(PLAIN), decode), plan_link(rank(PLAIN, guess), decode)
    assert [copy.layer_name for copy in alone.copies] == ["a"]
    assert (alone.owed_bytes([[(0, 16)]]), both.owed_bytes([[(0, 16)]])) == (64, 96)
    assert alone.coverage == full_coverage(owed_by(rank(PLAIN), decode)) == 4
    assert both.coverage == full_coverage(decode) == 6


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_layer_of_the_model_that_decode_takes_for_a_draft_models_is_refused(num_stages: int) -> None:
    """With stages no rank has all layers, and nothing else would tell that this one never comes."""
    prefill = msgspec.structs.replace(rank(PLAIN), num_stages=num_stages)
    with pytest.raises(ProtocolError, match=r"layer a is the model's own on prefill, a draft model's on decode: give"):
        plan_link(prefill, rank(changed(PLAIN, is_draft=True)))


def test_a_draft_model_on_prefill_alone_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"do not both have KV regions d\[0\] of group 0"):
        plan_link(rank(PLAIN, changed(PLAIN, layer_name="d", is_draft=True)), rank(PLAIN))


def test_state_whose_split_is_not_known_goes_between_equal_tp_sizes_only() -> None:
    assert plan_link(rank(STATE, tp_size=2), rank(STATE, tp_size=2)).coverage == 1
    with pytest.raises(ProtocolError, match=r"not known, with TP 2 on prefill, 1 on decode: give both the same --tens"):
        plan_link(rank(STATE, tp_size=2), rank(STATE))


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([StateRun(4, 0, 1, 0, 31)], "a run of 1 rows of 31 bytes for 2 units that ends at 31 in pages of 60"),
        ([StateRun(4, 32, 1, 0, 32)], "that ends at 64 in pages of 60"),
        ([StateRun(4, 0, 2, 40, 24)], "that ends at 64 in pages of 60"),
        ([StateRun(4, 0, 2, 20, 20)], "runs of 40 bytes in pages of 60"),
        ([StateRun(4, 0, 1 << 31, 0, 1 << 62)], "in pages of 60"),
        ([StateRun(3, 0, 1, 0, 60)], "3 heads or groups of a state cannot be spread over TP 2"),
    ],
)
def test_runs_that_are_not_the_whole_page_are_refused(runs: list[StateRun], words: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        require_possible(rank(changed(STATE, runs=tuple(runs)), tp_size=2), "prefill engine p")
    assert words in str(refused.value)


def test_one_more_run_than_the_other_side_has_is_refused() -> None:
    one, two = (changed(STATE, runs=(StateRun(4, 0, 1, 0, 60 // n),) * n) for n in (1, 2))
    with pytest.raises(ProtocolError, match=r"in runs \(units, bytes, rows\) .* on prefill, .* on decode: serve one"):
        plan_link(rank(one), rank(two))


def test_a_whole_state_of_equal_tp_is_one_write() -> None:
    runs = (StateRun(4, 0, 3, 16, 8), StateRun(4, 8, 3, 16, 8), StateRun(4, 48, 1, 12, 12))
    (shape,) = plan_link(rank(changed(STATE, runs=runs)), rank(changed(STATE, runs=runs))).shapes
    assert (shape.num_rows, shape.piece_bytes) == (1, 60)


def test_a_tp_that_splits_a_head_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"layer a: 4 KV heads cannot be spread over TP 3: choose a --tensor"):
        plan_link(rank(PLAIN, tp_size=3), rank(PLAIN))


def test_regions_pair_by_layer_name_whatever_their_order() -> None:
    ours = rank(changed(PLAIN, base=1000), changed(PLAIN, layer_name="b", base=2000))
    theirs = rank(changed(PLAIN, layer_name="b", base=70), changed(PLAIN, base=10))
    copies = plan_link(ours, theirs).copies
    assert [(c.layer_name, c.source_base, c.target_base) for c in copies] == [("a", 1000, 10), ("b", 2000, 70)]


def test_several_regions_of_a_layer_pair_in_order() -> None:
    ours = rank(changed(PLAIN, base=1), changed(PLAIN, base=2))
    theirs = rank(changed(PLAIN, base=30), changed(PLAIN, base=40))
    assert [(c.source_base, c.target_base) for c in plan_link(ours, theirs).copies] == [(1, 30), (2, 40)]


def test_layers_of_one_shape_share_their_ranges() -> None:
    layers = [changed(PLAIN, layer_name=f"l{n}", base=n * 1000) for n in range(60)]
    assert len(plan_link(rank(*layers), rank(*layers)).shapes) == 1


def test_token_major_blocks_of_equal_heads_go_as_they_are() -> None:
    tokens = changed(PLAIN, kind=RegionKind.TOKENS)
    (copy,) = plan_link(rank(tokens), rank(tokens)).copies
    assert not copy.is_resharded


def test_token_major_blocks_of_other_heads_are_resharded_and_shared_by_stripes() -> None:
    ours, theirs = changed(PLAIN, kind=RegionKind.TOKENS, page_bytes=32), changed(PLAIN, kind=RegionKind.TOKENS)
    links = [plan_link(rank(ours, tp_rank=number, tp_size=2), rank(theirs)) for number in range(2)]
    assert all(link.copies[0].is_resharded for link in links)
    assert [link.shapes[0].share.index for link in links] == [0, 1]
    assert [link.owed_bytes([[(0, 600)]]) for link in links] == [(256 + 96) * 4, 256 * 4]
