"""Sums see all of a region, and tell one region from another."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from pdcluster_connector.core.sending import Push, PushKey
from pdcluster_connector.device import CpuDevice, Device, NoStream, Stream
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.trace import Trace
from pdcluster_connector.worker.content_pass import CHUNK_BYTES
from pdcluster_connector.worker.content_sums import KvReader, PushSums
from pdcluster_connector.worker.pushes import LivePush, PushBook
from pdcluster_protocol.ids import Attempt, RequestId, TransferId
from pdcluster_protocol.side_channel import ContentSums, RankLayout, RegionLayout

CELL_BYTES, PAGE_TOKENS = 4096, 16
NUM_TOKENS = 3 * CHUNK_BYTES // CELL_BYTES
NUM_PAGES = NUM_TOKENS // PAGE_TOKENS
ORDER = ContentOrder((((0, NUM_TOKENS),),), (tuple(range(NUM_PAGES)),))


def reader_of(*layers: torch.Tensor) -> KvReader:
    """``layers``: uint8, ``[pages, 1 head, tokens, bytes]``."""
    page = PAGE_TOKENS * CELL_BYTES
    regions = tuple(
        RegionLayout(f"layers.{number}", 0, 0, NUM_PAGES, page, page, heads=1, page_tokens=PAGE_TOKENS)
        for number in range(len(layers))
    )
    return KvReader(RankLayout(0, 1, regions), layers)


def sums_of_layers(*layers: torch.Tensor) -> ContentSums:
    return reader_of(*layers).received(ORDER, "transfer").result()


def random_layer(seed: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (NUM_PAGES, 1, PAGE_TOKENS, CELL_BYTES), dtype=torch.uint8, generator=numbers)


def test_one_other_byte_in_any_chunk_of_a_region_has_other_sums() -> None:
    layer = random_layer(1)
    whole = sums_of_layers(layer)
    for page in (0, NUM_PAGES // 2, NUM_PAGES - 1):
        other = layer.clone()
        other[page, 0, -1, -1] ^= 1
        assert sums_of_layers(other) != whole, f"page {page} of {NUM_PAGES}"


def test_two_layers_in_each_others_place_have_other_sums() -> None:
    first, second = random_layer(1), random_layer(2)
    assert sums_of_layers(first, second) == sums_of_layers(first.clone(), second.clone())
    assert sums_of_layers(first, second) != sums_of_layers(second, first)


def test_one_flip_of_a_top_bit_does_not_hide_another() -> None:
    """Of a product modulo 2^64 the top bit of a factor leaves one bit: two of them would outweigh each other."""
    layer = random_layer(1)
    other = layer.clone()
    other.view(torch.int64)[0, 0, 0, 0] ^= -(1 << 63)
    other.view(torch.int64)[0, 0, 0, 1] ^= -(1 << 63)
    assert sums_of_layers(other) != sums_of_layers(layer)


class CountsStreams(CpuDevice):
    """How often it was asked for a stream."""

    def __init__(self) -> None:
        self.num_streams = 0

    def open_stream(self, device: torch.device) -> Stream:
        self.num_streams += 1
        return super().open_stream(device)


class Asked:
    """One push that has asked for its sums."""

    def __init__(self, device: Device) -> None:
        reader = reader_of(random_layer(1))
        self.sums = PushSums(reader, device)
        self.sums.decode_layout = reader.layout
        self.push = Push(PushKey(TransferId("t"), Attempt(1)), hold_s=30.0, deadline=60.0)
        self.push.grant(9.0, now=0.0)
        live = LivePush(self.push, RequestId("r"), "", NUM_TOKENS, 0.0, content=ORDER)
        self.book = PushBook(lambda _: None, lambda _: None, lambda _: None, Trace(""), self.sums.ask)
        self.book.add(live)
        self.sums.ask(live)


def test_a_push_that_has_stopped_since_it_asked_for_its_sums_asks_the_device_for_nothing() -> None:
    """Its lane may have failed in the very same turn, by the device."""
    for is_stopped in (True, False):
        device = CountsStreams()
        asked = Asked(device)
        if is_stopped:
            asked.book.give_up(asked.push.key, "prefill's device has failed", now=1.0)
        asked.sums.advance(asked.book, now=1.0)
        assert device.num_streams == (not is_stopped)
        assert asked.sums.is_busy is not is_stopped


@dataclass(frozen=True, slots=True)
class Breaks(CpuDevice):
    """As a device that raises at the stream's opening, or at the first thing that is asked of the stream."""

    is_fault: bool
    opens: bool

    def open_stream(self, device: torch.device) -> Stream:  # the CPU's
        if self.opens:
            return BrokenStream()
        raise RuntimeError("an illegal memory access was encountered")

    def is_of_its_call(self, error: Exception) -> bool:  # whatever it is
        return not self.is_fault


class BrokenStream(NoStream):
    def __enter__(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("opens", [False, True])
def test_what_may_be_of_other_work_than_the_sums_costs_more_than_their_push(opens: bool) -> None:
    own, fault = Asked(Breaks(is_fault=False, opens=opens)), Asked(Breaks(is_fault=True, opens=opens))
    own.sums.advance(own.book, now=1.0)
    assert "illegal memory access" in own.push.reason
    with pytest.raises(RuntimeError, match="illegal memory access"):
        fault.sums.advance(fault.book, now=1.0)
    assert not fault.push.reason, "the lane says why"
    assert not fault.sums.is_busy, "what was found so far is of a part"
