"""Sums see all of a region, and tell one region from another."""

from __future__ import annotations

import torch

from pdcluster_connector.core.sending import Push, PushKey
from pdcluster_connector.device import CpuDevice, Stream
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


def test_a_push_that_has_stopped_since_it_asked_for_its_sums_asks_the_device_for_nothing() -> None:
    """Its lane may have failed in the very same turn, by the device."""
    for is_stopped in (True, False):
        device, reader = CountsStreams(), reader_of(random_layer(1))
        sums = PushSums(reader, device)
        sums.decode_layout = reader.layout
        push = Push(PushKey(TransferId("t"), Attempt(1)), hold_s=30.0, deadline=60.0)
        push.grant(9.0, now=0.0)
        live = LivePush(push, RequestId("r"), "", NUM_TOKENS, 0.0, content=ORDER)
        book = PushBook(lambda _: None, lambda _: None, lambda _: None, Trace(""), sums.ask)
        book.add(live)
        sums.ask(live)
        if is_stopped:
            book.give_up(push.key, "prefill's device has failed", now=1.0)
        sums.advance(book, now=1.0)
        assert device.num_streams == (not is_stopped)
        assert sums.is_busy is not is_stopped
