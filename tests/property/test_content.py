"""The laws of digests: equal for equal content at each place, whatever the engines are; else not."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_connector.core.content import DIGEST_MASK, parts_pushed, parts_received
from pdcluster_connector.core.watermark import wanted_spans
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.worker.content import KvReader, digest_of
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


def order_of(scene: Scene, table: tuple[tuple[int, ...], ...]) -> ContentOrder:
    spans = tuple(
        wanted_spans(pair.decode, scene.prompt.cached_tokens, scene.prompt.num_tokens, blocks)
        for pair, blocks in zip(scene.groups, scene.decode_table, strict=True)
    )
    return ContentOrder(spans, table)


def received(scene: Scene, decode: RankLayout) -> Bytes:
    """A decode rank's memory, where each byte is where the model says: no plan has brought it there."""
    memory = np.full(size_of(decode), 77, np.int64)
    for region in decode.regions:
        table = scene.decode_table[region.group]
        spots, values = cells(region, decode, table, wanted(scene.groups[region.group].decode, scene, table))
        memory[spots] = values
    return memory


def pushed(scene: Scene, decode: RankLayout) -> int:
    order, total = order_of(scene, scene.prefill_table), 0
    for prefill in scene.prefill.ranks(scene.layers):
        reader = reader_of(filled(prefill, scene), prefill)
        total += sum(reader.sums(parts_pushed(prefill, decode), order, KEY))
    return total & DIGEST_MASK


def digest(reader: KvReader, order: ContentOrder, key: str = KEY) -> int:
    return sum(reader.sums(parts_received(reader.layout), order, key)) & DIGEST_MASK


@settings(max_examples=drawn(60), deadline=None)
@given(scenes())
def test_what_all_prefill_ranks_pushed_has_the_digest_of_what_a_decode_rank_received(scene: Scene) -> None:
    for decode in scene.decode.ranks(scene.layers):
        order = order_of(scene, scene.decode_table)
        assert digest(reader_of(received(scene, decode), decode), order) == pushed(scene, decode)


@settings(max_examples=drawn(60), deadline=None)
@given(scenes(), st.data())
def test_one_other_byte_is_another_digest(scene: Scene, data: st.DataObject) -> None:
    decode = data.draw(st.sampled_from(scene.decode.ranks(scene.layers)))
    assume(decode.regions)
    region = data.draw(st.sampled_from(decode.regions))
    memory, order = received(scene, decode), order_of(scene, scene.decode_table)
    table = scene.decode_table[region.group]
    spots, _ = cells(region, decode, table, wanted(scene.groups[region.group].decode, scene, table))
    assume(len(spots))
    before = digest(reader_of(memory, decode), order)
    spot = int(data.draw(st.sampled_from(spots.tolist())))
    was = as_bytes(memory)[spot]
    memory[spot] += 1 << 7
    assert as_bytes(memory)[spot] != was
    assert digest(reader_of(memory, decode), order) != before


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), st.integers(1, 20))
def test_a_digest_is_a_sum_over_cells_in_any_order_and_any_parts(seed: int, n: int, heads: int, size: int) -> None:
    content = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, heads, size), np.uint8))
    positions, whole = torch.arange(n) * 7, digest_of(content, torch.arange(n) * 7, 3, seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    assert digest_of(content[order], positions[order], 3, seed) == whole
    parts = [digest_of(content[:, h : h + 1], positions, 3 + h, seed) for h in range(heads)]
    assert sum(parts) & DIGEST_MASK == whole
    assert digest_of(content, positions + 1, 3, seed) != whole
    assert digest_of(content, positions, 4, seed) != whole
    assert digest_of(content, positions, 3, seed + 1) != whole


def test_digests_are_the_same_on_every_machine() -> None:
    content = torch.arange(48, dtype=torch.uint8).view(2, 2, 12)
    assert digest_of(content, torch.tensor([0, 5]), 1, -9) == KNOWN


KNOWN = 9197169434682724223
