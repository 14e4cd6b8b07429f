"""Gathered strips bring decode the very bytes that plain strips do, to the same places, each once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_connector.core.gathering import StripRun, is_small_strip, may_have_strips, plan_gathers
from pdcluster_connector.core.link import Link, plan_link
from pdcluster_connector.core.ranges import ByteRanges, GroupSlice, plan_ranges
from pdcluster_connector.reshard.strip_staging import strips_of
from pdcluster_protocol.side_channel import RankLayout
from property.engines import NUM_BLOCKS, Engine, Layer

Bytes: TypeAlias = npt.NDArray[np.uint8]
LAYERS = (Layer("a", 0, 8), Layer("b", 0, 4), Layer("c", 0, 0))
BLOCK = 8


@dataclass(frozen=True)
class Scene:
    """A prompt of whole blocks. ``padding``: bytes behind each page of an engine, prefill's first."""

    prefill_tp: int
    decode_tp: int
    page_tokens: int
    padding: tuple[int, int]
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    buffer_bytes: int

    def ranks(self, tp_size: int, padding: int) -> list[RankLayout]:
        return Engine(tp_size, 1, (BLOCK,), (self.page_tokens,), padding, (1,)).ranks(LAYERS)

    @property
    def part(self) -> GroupSlice:
        return GroupSlice(0, BLOCK * len(self.ours), self.ours, self.theirs)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Decode's blocks are runs of neighbours, in any order, as in a pool long in use."""
    free = draw(st.permutations(range(1, 41)))
    ours = tuple(free[: draw(st.integers(1, 40))])
    starts = draw(st.permutations(range(1, 80, draw(st.integers(1, 8)))))
    step = min(abs(starts[1] - starts[0]), 4)
    theirs = tuple(dict.fromkeys(start + at for start in starts for at in range(step)))
    falls = draw(st.booleans())
    chosen = theirs[: len(ours)][:: -1 if falls else 1]
    ours = ours[: len(chosen)]
    padding = draw(st.sampled_from([0, 0, 24])), draw(st.sampled_from([0, 0, 24]))
    tps = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4, 8]))
    page = draw(st.sampled_from([BLOCK, BLOCK // 2]))
    return Scene(*tps, page, padding, ours, chosen, draw(st.sampled_from([64, 200, 1 << 20])))


def plainly(ranges: ByteRanges, source: Bytes, target: Bytes, written: Bytes) -> None:
    for start, to, length in zip(ranges.source, ranges.target, ranges.num_bytes, strict=True):
        target[to : to + length] = source[start : start + length]
        written[to : to + length] += 1


def gathered(gather: StripRun, source: Bytes, target: Bytes, written: Bytes) -> None:
    """As a lane does it: copied by PyTorch into a buffer that held something else."""
    rows = torch.from_numpy((gather.sources - gather.first_source) // gather.step_bytes)
    strips = strips_of(torch.from_numpy(source), gather)
    buffer = torch.index_select(strips, 0, rows).contiguous().view(torch.uint8).numpy().reshape(-1)
    assert buffer.size == gather.num_bytes
    plainly(gather.writes, buffer, target, written)


def memories(size: int) -> tuple[Bytes, Bytes]:
    return np.zeros(size, np.uint8), np.zeros(size, np.uint8)


def region_of(rank: RankLayout, index: int) -> int:
    region = rank.regions[index]
    return NUM_BLOCKS * region.block_stride


def compare(scene: Scene, link: Link, prefill: RankLayout, decode: RankLayout) -> int:
    """How many copies were gathered."""
    count = 0
    for copy in link.copies:
        shape = link.shapes[copy.shape]
        ranges = plan_ranges(shape, scene.part)
        buffer_bytes = max(scene.buffer_bytes, shape.piece_bytes)
        gathers = plan_gathers(shape, ranges, buffer_bytes) if is_small_strip(shape) else ()
        if not gathers:
            continue
        count += 1
        assert all(gather.num_bytes <= buffer_bytes for gather in gathers)
        assert 2 * sum(len(gather.writes.source) for gather in gathers) <= len(ranges.source)
        source = np.random.default_rng(count).integers(1, 256, region_of(prefill, copy.source_index), np.uint8)
        wanted, once = memories(region_of(decode, copy.target_index))
        plainly(ranges, source, wanted, once)
        for way in ("buffers", "no buffers"):
            found, written = memories(region_of(decode, copy.target_index))
            for gather in gathers:
                if way == "buffers":
                    gathered(gather, source, found, written)
                else:
                    plainly(gather.strips, source, found, written)
            assert np.array_equal(found, wanted), way
            assert np.array_equal(written, once), way
    return count


@settings(max_examples=drawn(300))
@given(scenes())
def test_decode_gets_the_same_bytes_whether_strips_are_gathered_or_not(scene: Scene) -> None:
    for prefill in scene.ranks(scene.prefill_tp, scene.padding[0]):
        for decode in scene.ranks(scene.decode_tp, scene.padding[1]):
            count = compare(scene, plan_link(prefill, decode), prefill, decode)
            event(f"gathered copies of a link: {count}")
            if scene.padding[1] or (scene.decode_tp <= scene.prefill_tp and not scene.padding[0]):
                assert not count
            elif scene.decode_tp > scene.prefill_tp and count:
                assert may_have_strips(prefill)
