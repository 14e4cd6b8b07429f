"""Sums of the KV content that a rank pushed or received for a request, read through vLLM's own tensors.

``core/content.py`` decides which cells go into which sum, and ``content_pass.py`` what a sum is. Ranks, layers and
chunks may be added in any order. A sum costs little more than reading the memory. Sums do not protect against
attackers: the seals of the side channel do. A sum is computed on the tensor's own device, never in the forward pass nor
in its stream. The computing thread takes it in chunks and serves other requests in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np
import torch

from pdcluster_connector.core.content import (
    Cells,
    ContentPart,
    ContentPlan,
    Found,
    cells_of,
    parts_pushed,
    parts_received,
    plan_content,
)
from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.core.state_runs import unit_bytes, units_of
from pdcluster_connector.device import Device, Stream
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.worker.content_loop import LOOP_BYTES, Loop, plain_pass
from pdcluster_connector.worker.content_pass import (
    CHUNK_BYTES,
    GOLDEN,
    WORD_BYTES,
    Pages,
    PartSums,
    as_words,
    factors_of,
    odd_numbers,
)
from pdcluster_connector.worker.pushes import LivePush, PushBook
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.side_channel import ContentSums, RankLayout


@dataclass(frozen=True, slots=True)
class KvReader:
    """Reads a rank's KV. ``views``: of each region ``[pages, KV heads, tokens, bytes]``, uint8, borrowed.

    ``loop``: finds the sums of plain memory; None: PyTorch's operators find them.
    """

    layout: RankLayout
    views: Sequence[torch.Tensor]
    loop: Loop | None = None

    @property
    def where(self) -> torch.device:
        """The rank's device."""
        return self.views[0].device

    def received(self, order: ContentOrder, seed: str, *, has_draft: bool = False) -> SumsUnderWay:
        """This decode rank's sums of the transfer with id ``seed``; ``has_draft``: a draft model's KV came too."""
        plan = plan_content(order.check, self.layout, order.spans, seed)
        return SumsUnderWay(self, plan, parts_received(self.layout, has_draft=has_draft), order, seed)

    def pushed(self, decode: RankLayout, order: ContentOrder, seed: str) -> SumsUnderWay:
        """This prefill rank's sums, of the transfer with id ``seed``, for the rank of layout ``decode``."""
        plan = plan_content(order.check, decode, order.spans, seed)
        return SumsUnderWay(self, plan, parts_pushed(self.layout, decode), order, seed)

    def view_of(self, part: ContentPart) -> torch.Tensor:
        """The part's region as ``[pages, heads, tokens, bytes]``; a state's run as ``[blocks, units, rows, bytes]``."""
        view = self.views[part.region]
        if part.run is None:
            return view
        run = self.layout.regions[part.region].runs[part.run]
        units, size = len(units_of(run, self.layout)), unit_bytes(run, self.layout)
        shape, strides = (view.shape[0], units, run.num_rows, size), (view.stride(0), size, run.row_stride, 1)
        return view.as_strided(shape, strides, view.storage_offset() + run.offset)


class SumsUnderWay:
    """The sums of one request on one rank. They are whole after the last ``advance``, and only ``advance`` reads KV."""

    def __init__(
        self, reader: KvReader, plan: ContentPlan, parts: Sequence[ContentPart], order: ContentOrder, seed: str
    ) -> None:
        self._reader = reader
        self._order = order
        self._seed = _number_of(seed)
        self.plan = plan
        self._result: ContentSums | None = None
        self._factors: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._chunks = self._read([part for part in parts if part.target in plan.picks])

    def advance(self) -> bool:
        """Reads one chunk. False: no chunk was left."""
        return next(self._chunks, False)

    def result(self) -> ContentSums:
        """The whole sums; reads the chunks that are left. The first call copies them from the device, in its stream."""
        while self.advance():
            pass
        if self._result is None:
            self._result = ContentSums(_as_bytes(self._rows), _as_bytes(self._ranges))
        return self._result

    def _read(self, parts: Sequence[ContentPart]) -> Iterator[bool]:
        # Made here, in the stream that advances: another stream might set the sums to zero after the first addition.
        where = self._reader.where
        self._rows = torch.zeros(self.plan.num_rows, dtype=torch.int64, device=where)
        self._ranges = torch.zeros(len(self.plan.numbers), dtype=torch.int64, device=where)
        # For all rows at once: a call and a copy to the device for each layer took a tenth of a short prompt's time.
        self._heads = torch.from_numpy(odd_numbers(np.arange(self.plan.num_rows), GOLDEN))[:, None].to(where)
        known: dict[object, Pages] = {}
        for part in parts:
            region, ranges = self._reader.layout.regions[part.region], self.plan.spans_of(part.target)
            num_rows = 0 if part.run is None else region.runs[part.run].num_rows
            kind = (region.page_tokens, region.kind, region.is_linear, region.is_draft, num_rows)
            shape = (region.group, part.share, part.stripe, ranges, kind)
            if shape not in known:  # Layers of one shape have their cells in the same places.
                spans, table = self._order.spans[region.group], self._order.tables[region.group]
                cells = cells_of(part, region, spans, table, ranges)
                known[shape] = _pages_of(cells, region.page_tokens, self.plan, self._seed, self._reader.where)
            for _ in self._read_part(part, known[shape]):
                yield True

    def _read_part(self, part: ContentPart, pages: Pages) -> Iterator[None]:
        sums = self._sums_of(part, pages)
        plain = plain_pass(sums, self._reader.loop)
        add, size = (sums.add_by_operators, CHUNK_BYTES) if plain is None else (plain.add, LOOP_BYTES)
        at_once = sums.pages_of(size)
        for first in range(0, len(pages.numbers), at_once):
            add(slice(first, first + at_once))
            yield

    def _sums_of(self, part: ContentPart, pages: Pages) -> PartSums:
        content = as_words(self._reader.view_of(part))[:, part.rows.start : part.rows.stop]
        row, units = self.plan.row_starts[part.target] + part.target_row, _units_of(part, content.device)
        rows = slice(row, row + (len(part.rows) if units is None else 1))
        factors = self._factors_of(content)
        return PartSums(content, pages, factors, units, self._heads[rows], self._rows[rows], self._ranges)

    def _factors_of(self, content: torch.Tensor) -> torch.Tensor:
        kind = content.shape[-1], content.dtype
        if kind not in self._factors:
            self._factors[kind] = factors_of(content)
        return self._factors[kind]


def _pages_of(cells: Cells, page_tokens: int, plan: ContentPlan, seed: int, where: torch.device) -> Pages:
    is_first = np.ones(len(cells.pages), bool)  # The cells of a page follow each other.
    is_first[1:] = (cells.pages[1:] != cells.pages[:-1]) | (cells.slots[1:] <= cells.slots[:-1])
    numbers, turns = cells.pages[is_first], np.cumsum(is_first) - 1
    tokens = 1 if not len(cells.slots) else max(page_tokens, int(cells.slots.max()) + 1)
    weights, slots = np.zeros((len(numbers), tokens), np.int64), np.zeros((len(numbers), tokens), np.int64)
    weights[turns, cells.slots] = odd_numbers(cells.positions, seed)
    slots[turns, cells.slots] = plan.slots_of(cells.positions)
    return Pages(*(torch.from_numpy(found).to(where) for found in (numbers, weights, slots)))


K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class SumQueue(Generic[K]):
    """Sums under way. Not thread-safe: one thread owns the queue and computes the sums, in a stream of their own.

    On an NPU a thread works in the forward pass's stream unless it opens another stream. In the forward pass's stream
    each chunk would wait for all steps that are under way.
    """

    device: Device
    """The rank's device."""
    _stream: Stream | None = None
    _sums: dict[K, SumsUnderWay] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._sums)

    def start(self, key: K, sums: SumsUnderWay, where: torch.device) -> None:
        """Queues ``sums``, which read the memory of ``where``."""
        self._stream = self._stream or self.device.open_stream(where)
        self._sums[key] = sums

    def drop(self, key: K) -> None:
        """These sums are not wanted any more; their memory is not read again."""
        self._sums.pop(key, None)

    @property
    def next_key(self) -> K | None:
        """The key of the sums that ``advance`` reads for; None: the queue is empty."""
        return next(iter(self._sums), None)

    def advance(self) -> SumsUnderWay | None:
        """Reads one chunk for the oldest sums, which must exist. Returns these sums if they are whole now."""
        assert self._stream is not None, "nothing was started"
        key = next(iter(self._sums))
        with self._stream:
            if self._sums[key].advance():
                return None
            self._sums[key].result()  # Waits for the device here, in this stream.
        return self._sums.pop(key)


class PushSums:
    """The sums of one lane's pushes, over the KV that they push. Lane thread only."""

    def __init__(self, reader: KvReader | None, device: Device) -> None:
        """``reader``: of the rank's own KV; None where no content can be compared."""
        self._reader = reader
        self._device = device
        self._asked: deque[LivePush] = deque()
        self._queue: SumQueue[PushKey] = SumQueue(device)
        self.decode_layout: RankLayout | None = None
        """The layout of the decode rank that the lane serves, from its ``Welcome``."""

    @property
    def is_busy(self) -> bool:
        return len(self._asked) + len(self._queue) > 0

    def ask(self, live: LivePush) -> None:
        """Queues a push for its sums. All of its bytes are acknowledged."""
        self._asked.append(live)

    def advance(self, book: PushBook, now: float) -> None:
        """Reads one chunk for the oldest push; the lane works for others in between. A failed call costs one push.

        Raises the device's error if it may be about other work than these sums: this class cannot tell what else the
        device has not done.
        """
        while self._asked:
            self._start(self._asked.popleft(), book, now)
        if (key := self._queue.next_key) is None:
            return
        live = book.get(key)
        if live is None or not live.push.may_write:
            self._queue.drop(key)  # Its blocks may be another request's by now.
        else:
            self._read(live, book, now)

    def _start(self, live: LivePush, book: PushBook, now: float) -> None:
        if self._reader is None or self.decode_layout is None or live.content is None:
            self._cannot_read(live, "it has no tensors of it", book, now)
            return
        if not live.push.may_write:
            return  # The lane may have failed meanwhile. It then does not query its device any more.
        try:
            sums = self._reader.pushed(self.decode_layout, live.content, live.push.key.transfer_id)
            self._queue.start(live.push.key, sums, self._reader.where)
        except Exception as error:  # whatever the device's library raises
            if not self._device.is_of_its_call(error):
                raise
            self._cannot_read(live, str(error), book, now)

    def _read(self, live: LivePush, book: PushBook, now: float) -> None:
        try:
            sums = self._queue.advance()
        except Exception as error:  # whatever the device's library raises
            self._queue.drop(live.push.key)  # The sums found so far are of a part only.
            if not self._device.is_of_its_call(error):
                raise
            self._cannot_read(live, str(error), book, now)
        else:
            if sums is not None:
                book.apply(live, live.push.summed_up(sums.result()))

    def _cannot_read(self, live: LivePush, why: str, book: PushBook, now: float) -> None:
        """Gives the push up: without its sums nothing is proven."""
        reason = f"this prefill rank cannot read its own KV, so that its content cannot be compared: {why}"
        book.apply(live, live.push.give_up(reason, now=now))


class ReceiveSums:
    """The sums of what has arrived at one decode rank. Receiver thread only."""

    def __init__(self, reader: KvReader | None, device: Device) -> None:
        """``reader``: of the rank's own KV; None where no content can be compared."""
        self._reader = reader
        self._wanted: dict[TransferId, ContentOrder] = {}
        """The orders of transfers whose content is compared and whose wait has not ended."""
        self._queue: SumQueue[tuple[TransferId, Attempt]] = SumQueue(device)

    @property
    def is_busy(self) -> bool:
        return len(self._queue) > 0

    @property
    def next_transfer(self) -> TransferId | None:
        """The transfer that ``advance`` reads for; None: there is none."""
        key = self._queue.next_key
        return None if key is None else key[0]

    def expect(self, transfer: TransferId, order: ContentOrder | None) -> None:
        """The transfer was announced. ``order``: None: its content is not compared."""
        if order is not None:
            self._wanted[transfer] = order

    def forget(self, transfer: TransferId) -> bool:
        """Forgets a transfer whose wait is over. Returns whether its content was to be compared."""
        return self._wanted.pop(transfer, None) is not None

    def start(self, transfer: TransferId, attempt: Attempt, *, has_draft: bool) -> bool:
        """Queues the sums of an attempt with which every prefill rank is done. False: this rank cannot read its own KV.

        ``has_draft``: a draft model's KV came too.
        """
        if self._reader is None:
            return False
        sums = self._reader.received(self._wanted[transfer], transfer, has_draft=has_draft)
        self._queue.start((transfer, attempt), sums, self._reader.where)
        return True

    def advance(self) -> tuple[TransferId, Attempt, Found] | None:
        """Reads one chunk for the oldest attempt; the thread works for others in between. Returns sums that are whole.

        Raises the errors of the device's library; the sums of this attempt then cover a part only.
        """
        if (key := self._queue.next_key) is None:
            return None
        if key[0] not in self._wanted:
            self._queue.drop(key)  # Its wait has ended: its blocks may be another request's by now.
            return None
        sums = self._queue.advance()
        return None if sums is None else (*key, Found(sums.plan, sums.result()))


def _units_of(part: ContentPart, where: torch.device) -> torch.Tensor | None:
    """``[units, 1]``: the factor of each unit of a state's run; None: rows are heads."""
    if part.run is None:
        return None
    numbers = np.arange(part.first_unit, part.first_unit + len(part.rows))
    return torch.from_numpy(odd_numbers(numbers, _number_of(f"run {part.run}")))[:, None].to(where)


def _number_of(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=WORD_BYTES).digest(), "little")


def _as_bytes(sums: torch.Tensor) -> bytes:
    return sums.cpu().numpy().astype("<i8").tobytes()
