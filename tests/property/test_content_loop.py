"""The compiled pass finds the very sums that PyTorch's operators find, whatever is read and however it lies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_connector.core.ranges import TokenSpan
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.worker.content_loop import compiled_loop, plain_pass
from pdcluster_connector.worker.content_pass import Pages, PartSums, as_words, factors_of
from pdcluster_connector.worker.content_sums import KvReader
from pdcluster_protocol.params import ContentCheck
from pdcluster_protocol.side_channel import RankLayout, RegionLayout

torch.set_num_threads(1)

pytestmark = pytest.mark.long  # Numba compiles: seconds.

DTYPES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64]
AXES = [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3)]
"""Where pages, heads, tokens and values lie in memory: heads first, tokens first, and axes that no engine has."""


class Foreign(torch.Tensor):
    """Of a type whose operations may run later: only PyTorch may read it."""


@dataclass(frozen=True)
class Kv:
    """``view``: ``[pages, heads, tokens, bytes]``, uint8, within memory that holds more."""

    view: torch.Tensor
    seed: int

    @property
    def numbers(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


@st.composite
def kvs(draw: st.DrawFn) -> Kv:
    sizes = [draw(st.integers(1, most)) for most in (9, 4, 5)]
    dtype, axes, seed = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(AXES)), draw(st.integers(0, 2**32))
    num_words, first = draw(st.integers(1, 9)), draw(st.integers(0, 2))
    shape = (*sizes, num_words * 8 // dtype.itemsize)
    numbers = torch.Generator().manual_seed(seed)
    places = [first + shape[axis] for axis in axes[:-1]]
    size = (*places, shape[3] * 2 * dtype.itemsize)  # K and V of a cell side by side, of which one is read
    memory = torch.randint(0, 256, size, dtype=torch.uint8, generator=numbers).view(dtype)
    whole = memory.permute([axes.index(axis) for axis in range(4)])
    view = whole[first:, first:, first:, shape[3] :]
    return Kv(view.view(torch.uint8), seed)


def drawn_int64(kv: Kv, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=kv.numbers)


def part_sums(kv: Kv, numbers: list[int], heads: range, *, has_units: bool, num_ranges: int) -> PartSums:
    content = as_words(kv.view)[:, heads.start : heads.stop]
    tokens, num_rows = content.shape[2], 1 if has_units else len(heads)
    weights = drawn_int64(kv, len(numbers), tokens) * torch.randint(0, 2, (len(numbers), tokens), generator=kv.numbers)
    slots = torch.randint(0, num_ranges, (len(numbers), tokens), generator=kv.numbers)
    units = drawn_int64(kv, len(heads), 1) if has_units else None
    pages = Pages(torch.tensor(numbers, dtype=torch.int64), weights, slots)
    return PartSums(
        content,
        pages,
        factors_of(content),
        units,
        drawn_int64(kv, num_rows, 1),
        drawn_int64(kv, num_rows),
        drawn_int64(kv, num_ranges),
    )


@settings(max_examples=drawn(300), deadline=None)
@given(kvs(), st.data())
def test_each_part_has_equal_sums_both_ways(kv: Kv, data: st.DataObject) -> None:
    num_pages, num_heads = kv.view.shape[:2]
    numbers = data.draw(st.lists(st.integers(0, num_pages - 1), min_size=1, max_size=12))
    first = data.draw(st.integers(0, num_heads - 1))
    heads = range(first, data.draw(st.integers(first + 1, num_heads)))
    has_units, num_ranges = data.draw(st.booleans()), data.draw(st.integers(1, 4))
    ours = part_sums(kv, numbers, heads, has_units=has_units, num_ranges=num_ranges)
    theirs = replace(ours, rows=ours.rows.clone(), ranges=ours.ranges.clone())
    at_once = data.draw(st.integers(1, len(numbers)))
    compiled = plain_pass(ours, compiled_loop())
    assert compiled is not None
    for begin in range(0, len(numbers), at_once):
        compiled.add(slice(begin, begin + at_once))
        theirs.add_by_operators(slice(begin, begin + at_once))
    assert torch.equal(ours.rows, theirs.rows)
    assert torch.equal(ours.ranges, theirs.ranges)


@settings(max_examples=drawn(100), deadline=None)
@given(kvs(), st.sampled_from([ContentCheck.FULL, ContentCheck.SAMPLED]), st.data())
def test_a_request_has_equal_sums_both_ways(kv: Kv, check: ContentCheck, data: st.DataObject) -> None:
    pages, heads, tokens, size = kv.view.shape
    table = data.draw(st.permutations(range(pages)))
    stop = data.draw(st.integers(1, pages * tokens))
    spans: tuple[TokenSpan, ...] = ((data.draw(st.integers(0, stop - 1)), stop),)
    is_linear, num_bytes = data.draw(st.booleans()), heads * tokens * size
    region = RegionLayout(
        "layer", 0, 0, pages, num_bytes, num_bytes, heads=heads, page_tokens=tokens, is_linear=is_linear
    )
    order, layout = ContentOrder((spans,), (tuple(table),), check), RankLayout(0, 1, (region,))
    plain, foreign = (
        KvReader(layout, (view,), compiled_loop()).received(order, "transfer").result()
        for view in (kv.view, kv.view.as_subclass(Foreign))
    )
    assert plain == foreign
