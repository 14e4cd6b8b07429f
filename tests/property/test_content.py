"""The laws of sums of content: equal for equal content at each place, whatever the engines are; else not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tools.device_check.content_sums import sum_of_cells

from drawn import drawn
from pdcluster_connector.core.content import (
    ContentPart,
    Found,
    Mismatch,
    cells_of,
    common_spans,
    find_mismatch,
    plan_content,
)
from pdcluster_connector.core.watermark import wanted_spans
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.worker.content_sums import KvReader
from pdcluster_protocol.params import ContentCheck
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout
from property.engines import CELL, Scene, scenes
from property.test_link import Bytes, cells, filled, size_of, wanted

torch.set_num_threads(1)  # a few bytes at a time: two threads cost twice the time of one

KEY = "transfer"


def as_bytes(memory: Bytes) -> torch.Tensor:
    """One byte for each, made from the number that names it in the model."""
    return torch.from_numpy((memory * 2654435761 >> 7).astype(np.uint8))


def view_of(memory: torch.Tensor, region: RegionLayout, rank: RankLayout) -> torch.Tensor:
    pages = region.num_blocks * region.pages_per_block
    if region.kind is RegionKind.STATE:
        shape, inner = (pages, 1, 1, region.page_bytes), (region.page_bytes, region.page_bytes, 1)
    else:
        heads = region.page_bytes // (region.page_tokens * CELL)
        shape, inner = (pages, heads, region.page_tokens, CELL), (region.page_tokens * CELL, CELL, 1)
    assert rank.regions
    return memory.as_strided(shape, (region.page_stride, *inner), region.base)


def reader_of(memory: Bytes, rank: RankLayout) -> KvReader:
    data = torch.nn.functional.pad(as_bytes(memory), (0, 64))
    return KvReader(rank, [view_of(data, region, rank) for region in rank.regions])


def order_of(scene: Scene, table: tuple[tuple[int, ...], ...], check: ContentCheck = ContentCheck.FULL) -> ContentOrder:
    spans = tuple(
        wanted_spans(pair.decode, scene.prompt.cached_tokens, scene.prompt.num_tokens, blocks)
        for pair, blocks in zip(scene.groups, scene.decode_table, strict=True)
    )
    return ContentOrder(spans, table, check)


def received(scene: Scene, decode: RankLayout) -> Bytes:
    """A decode rank's memory, where each byte is where the model says: no plan has brought it there."""
    memory = np.full(size_of(decode), 77, np.int64)
    for region in decode.regions:
        table = scene.decode_table[region.group]
        spots, values = cells(region, decode, table, wanted(scene.groups[region.group].decode, scene, table))
        memory[spots] = values
    return memory


def compare(
    scene: Scene, decode: RankLayout, memory: Bytes, check: ContentCheck = ContentCheck.FULL
) -> Mismatch | None:
    """What decode finds with ``memory``, and right memory on all prefill ranks."""
    pushed = []
    for prefill in (rank for rank in scene.prefill.ranks(scene.pushed) if rank.regions):
        reader = reader_of(filled(prefill, scene), prefill)
        pushed.append(reader.pushed(decode, order_of(scene, scene.prefill_table, check), KEY).result())
    order = order_of(scene, scene.decode_table, check)
    here = reader_of(memory, decode).received(order, KEY)
    return find_mismatch(Found(plan_content(check, decode, order.spans, KEY), here.result()), pushed)


@pytest.mark.parametrize("check", [ContentCheck.SAMPLED, ContentCheck.FULL])
@settings(max_examples=drawn(60), deadline=None)
@given(scene=scenes())
def test_what_all_prefill_ranks_pushed_adds_up_to_what_a_decode_rank_received(
    check: ContentCheck, scene: Scene
) -> None:
    for decode in scene.decode.ranks(scene.layers):
        if decode.regions:
            assert compare(scene, decode, received(scene, decode), check) is None


@settings(max_examples=drawn(60), deadline=None)
@given(scenes(), st.data())
def test_one_other_byte_is_found_with_its_region_and_its_tokens(scene: Scene, data: st.DataObject) -> None:
    decode = data.draw(st.sampled_from(scene.decode.ranks(scene.layers)))
    compared = [number for number, region in enumerate(decode.regions) if not region.is_draft]
    assume(compared)
    number = data.draw(st.sampled_from(compared))
    region, memory = decode.regions[number], received(scene, decode)
    table, group = scene.decode_table[region.group], scene.groups[region.group].decode
    spots, _ = cells(region, decode, table, wanted(group, scene, table))
    assume(len(spots))
    spot = int(data.draw(st.sampled_from(spots.tolist())))
    was = as_bytes(memory)[spot]
    memory[spot] += 1 << 7
    assert as_bytes(memory)[spot] != was
    mismatch = compare(scene, decode, memory)
    assert mismatch is not None
    assert mismatch.regions == (number,)
    (named,) = mismatch.ranges
    spans = order_of(scene, scene.decode_table).spans[region.group]
    inside = np.concatenate([np.arange(*run) for run in common_spans(spans, [named])])
    assert spot in cells(region, decode, table, inside)[0], "the tokens that are named are not those"


@pytest.mark.parametrize(
    ("is_linear", "is_draft", "last"),
    [(True, False, 39), (True, True, 39), (False, False, 47), (False, True, 31)],
)
def test_a_page_that_a_draft_model_still_writes_guesses_to_does_not_count(
    is_linear: bool, is_draft: bool, last: int
) -> None:
    """40 tokens in pages of 16: guesses stand behind them in the third."""
    region = RegionLayout("layer", 0, 0, 8, 64, 64, is_linear=is_linear, is_draft=is_draft)
    found = cells_of(ContentPart(0, range(1), 0), region, ((0, 40),), [3, 4, 5])
    assert found.positions.tolist() == list(range(last + 1))


def test_the_range_that_is_always_sampled_is_the_models_own_last_one() -> None:
    own, draft = (RegionLayout("layer", 0, 0, 64, 64, 64, is_draft=is_draft) for is_draft in (False, True))
    decode = RankLayout(0, 1, (own, own, draft))
    plans = [plan_content(ContentCheck.SAMPLED, decode, (((0, 100),),), str(key)) for key in range(200)]
    assert all(100 // 16 in plan.picks[1] for plan in plans)
    assert not all(2 in plan.picks for plan in plans)


@settings(max_examples=drawn(40), deadline=None)
@given(scenes())
def test_a_sample_that_differs_stands_for_all_that_was_pushed(scene: Scene) -> None:
    """Of a push that went wrong everywhere a sample sees some places: the others must not stay as they are."""
    for decode in scene.decode.ranks(scene.layers):
        spoiled = received(scene, decode) + (1 << 7)
        mismatch = compare(scene, decode, spoiled, ContentCheck.SAMPLED) if decode.regions else None
        if mismatch is None:
            continue
        spans = order_of(scene, scene.decode_table).spans
        wanted_of = {index: spans[region.group] for index, region in enumerate(decode.regions) if spans[region.group]}
        assert set(mismatch.regions) == set(wanted_of)
        (named,) = mismatch.ranges
        assert named[0] == 0
        assert named[1] >= max(stop for of_region in wanted_of.values() for _, stop in of_region)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), st.integers(1, 20))
def test_a_sum_is_one_over_cells_in_any_order_and_any_parts(seed: int, n: int, heads: int, size: int) -> None:
    content = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, heads, size), np.uint8))
    positions, whole = torch.arange(n) * 7, sum_of_cells(content, torch.arange(n) * 7, seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    assert sum_of_cells(content[order], positions[order], seed) == whole
    parts = [sum_of_cells(content[:, h : h + 1], positions, seed) for h in range(heads)]
    assert sum(parts) % (1 << 64) == whole
    assume(whole)
    assert sum_of_cells(content, positions + 1, seed) != whole
    assert sum_of_cells(content, positions, seed + 1) != whole


def test_sums_are_the_same_on_every_machine() -> None:
    content = torch.arange(48, dtype=torch.uint8).view(2, 2, 12)
    assert sum_of_cells(content, torch.tensor([0, 5]), 9) == KNOWN


KNOWN = 11871513654930001584
