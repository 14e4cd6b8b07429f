"""Staging memory of a prefill rank for small strips: lanes copy strips into it, and write from there.

    lane thread --begin(region, gather)--> buffer, copy on the lane's own stream --event--> writes --release--> buffer

A lane copies only after the layer's device event is complete, and writes only after the copy's event is. A buffer comes
back when nothing reads it any more *and* its copy is over: when a push stops, its copy may still be under way, and
would spoil the next strips in the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Final
from weakref import WeakKeyDictionary

import torch

from pdcluster_connector.core.gathering import StripRun
from pdcluster_connector.device import Device, DeviceEvent, Stream
from pdcluster_connector.reshard.staging import StagingBuffer, StagingMemory, Ticket

_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class GatheredStrips:
    """Strips that lie from ``address`` on once ``copied`` is complete. The holder releases ``buffer`` once."""

    address: int
    copied: DeviceEvent
    buffer: StagingBuffer


@dataclass(slots=True)
class StripStaging:
    """All lanes of one rank share it. ``data``: by region index, uint8 [bytes of the region], borrowed."""

    memory: StagingMemory
    data: Mapping[int, torch.Tensor]
    device: Device
    _under_way: list[tuple[Ticket, DeviceEvent]] = field(default_factory=list)
    """Buffers that nothing reads any more, but whose copies may still be under way."""
    _lock: Lock = field(default_factory=Lock)
    """Guards ``_under_way``."""

    @property
    def is_idle(self) -> bool:
        """Whether every buffer has come back. For a thread that has entered the device."""
        self._sweep()
        return self.memory.is_idle

    def take(self, num_bytes: int) -> Ticket | None:
        """A buffer; None: none is free now. For a thread that has entered the device; never waits."""
        self._sweep()
        return self.memory.take_now(num_bytes)

    def give_back(self, ticket: Ticket, copied: DeviceEvent) -> None:
        """Nothing reads the buffer any more. It is free once ``copied`` is complete. For a thread that has entered the
        device."""
        with self._lock:
            self._under_way.append((ticket, copied))
        self._sweep()

    def _sweep(self) -> None:
        with self._lock:
            over = [pair for pair in self._under_way if self._is_over(pair[1])]
            self._under_way = [pair for pair in self._under_way if pair not in over]
        for ticket, _ in over:
            self.memory.release(ticket)

    def _is_over(self, copied: DeviceEvent) -> bool:
        try:
            return self.device.is_done(copied)
        except RuntimeError:  # A broken device may still write. The lanes learn of the fault from ``num_faults``.
            return False


class StripGatherer:
    """Gathers one lane's strips. Lane thread only; never waits for a peer."""

    def __init__(self, staging: StripStaging) -> None:
        self._staging = staging
        self._stream: Stream | None = None
        self._rows: WeakKeyDictionary[StripRun, torch.Tensor] = WeakKeyDictionary()
        """For each gather, the rows of its strips in ``strips_of``. One gather of a step serves every layer."""

    def begin(self, region: int, gather: StripRun) -> GatheredStrips | None:
        """The strips of ``gather`` in ``region`` (index) are being copied; None: there is no space.

        The region's layer must be final.
        """
        self._stream = self._stream or self._staging.device.open_stream(self._staging.memory.tensor.device)
        with self._stream:
            rows = self._rows_of(gather)
        ticket = self._staging.take(gather.num_bytes)
        if ticket is None:
            return None
        # After an error from here on the device may still write into the buffer, so the buffer never comes back.
        copied = self._copy(self._stream, region, gather, rows, ticket)
        release = partial(self._staging.give_back, ticket, copied)
        return GatheredStrips(self._staging.memory.address + ticket.offset, copied, StagingBuffer(release))

    def _copy(self, stream: Stream, region: int, gather: StripRun, rows: torch.Tensor, ticket: Ticket) -> DeviceEvent:
        buffer = self._staging.memory.tensor[ticket.offset : ticket.offset + gather.num_bytes]
        with stream:
            strips = strips_of(self._staging.data[region], gather)
            torch.index_select(strips, 0, rows, out=buffer.view(strips.dtype).view(-1, strips.shape[1]))
            return stream.record_event()

    def _rows_of(self, gather: StripRun) -> torch.Tensor:
        if gather not in self._rows:
            rows = (gather.sources - gather.first_source) // gather.step_bytes
            self._rows[gather] = torch.from_numpy(rows).to(self._staging.memory.tensor.device)
        return self._rows[gather]


def bytes_from(view: torch.Tensor, base: int, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes]: the memory from address ``base`` on, in the storage of ``view`` (uint8, strided)."""
    return view.as_strided((num_bytes,), (1,), view.storage_offset() + base - view.data_ptr())


def strips_of(data: torch.Tensor, gather: StripRun) -> torch.Tensor:
    """Words [step, words of a strip]: row ``k`` is the strip that begins ``k`` steps after the first; rows may overlap.

    ``data``: uint8 [bytes of the region]. The words are the widest of which all strips are made.
    """
    begin, size, step = gather.first_source, gather.strip_bytes, gather.step_bytes
    word = math.gcd(8, size, step, data.data_ptr() + begin, data.storage_offset() + begin)
    rows = (data.numel() - begin - size) // step + 1
    usable = data[begin : begin + (data.numel() - begin) // word * word].view(_WORDS[word])
    return usable.as_strided((rows, size // word), (step // word, 1), usable.storage_offset())
