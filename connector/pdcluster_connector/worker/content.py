"""Digests of KV: one number for what a rank pushed or received of a request, read through vLLM's own tensors.

    digest = sum over cells, over words of 8 bytes, of mix(word ^ mix(place of the word))  modulo 2^64

The cells are ``core/content.py``'s. A sum has no order, so that ranks, layers and chunks may come in any. It is no
proof against somebody who wants to deceive: the side channel is sealed against those. It is computed on the tensor's
own device, never in the forward pass nor in its stream, and in chunks: the thread that computes it serves others in
between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, Generic, TypeVar

import torch

from pdcluster_connector.core.content import DIGEST_MASK, Cells, ContentPart, cells_of, parts_pushed, parts_received
from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.core.state_runs import unit_bytes, units_of
from pdcluster_connector.device import Device, Stream
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.worker.pushes import LivePush, PushBook
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.side_channel import RankLayout

CHUNK_BYTES: Final = 1 << 20
"""What is read at once: about 5 ms of a CPU core."""
_WORD_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class KvReader:
    """A rank's KV by logical place. ``views``: of each region ``[pages, KV heads, tokens, bytes]``, uint8, borrowed."""

    layout: RankLayout
    views: Sequence[torch.Tensor]

    @property
    def where(self) -> torch.device:
        """Of the rank."""
        return self.views[0].device

    def sums(self, parts: Sequence[ContentPart], order: ContentOrder, key: str) -> Iterator[int]:
        """The digest in parts, one for each chunk; reads memory as it is iterated. ``key``: the transfer's."""
        for part in parts:
            cells = cells_of(part, self.layout.regions[part.region], order.spans, order.tables)
            yield from self._region_sums(part, cells, _number_of(f"{key}/{part.name}"))

    def _region_sums(self, part: ContentPart, cells: Cells, key: int) -> Iterator[int]:
        view = self._view_of(part)
        at_once = max(1, CHUNK_BYTES // (len(part.rows) * view.shape[3]))
        for start in range(0, len(cells.positions), at_once):
            now = slice(start, start + at_once)
            pages, slots, positions = (
                torch.from_numpy(numbers[now]).to(view.device)
                for numbers in (cells.pages, cells.slots, cells.positions)
            )
            content = view[pages, part.rows.start : part.rows.stop, slots]
            yield digest_of(content, positions, part.first_head, key)

    def _view_of(self, part: ContentPart) -> torch.Tensor:
        """``[pages, rows, slots, bytes]``; of a state's run ``[blocks, units, rows, bytes]``."""
        view = self.views[part.region]
        if part.run is None:
            return view
        run = self.layout.regions[part.region].runs[part.run]
        units, size = len(units_of(run, self.layout)), unit_bytes(run, self.layout)
        shape, strides = (view.shape[0], units, run.num_rows, size), (view.stride(0), size, run.row_stride, 1)
        return view.as_strided(shape, strides, view.storage_offset() + run.offset)


def digest_of(content: torch.Tensor, positions: torch.Tensor, first_head: int, key: int) -> int:
    """Of cells ``content``: ``[positions, heads, bytes]``, uint8, any device; ``positions``: int64, of the tokens."""
    words = _words_of(content)
    device = content.device
    heads = torch.arange(first_head, first_head + words.shape[1], device=device)
    numbers = torch.arange(words.shape[2], device=device)
    place = positions[:, None, None] * _P + heads[None, :, None] * _Q + numbers * _R + key
    return int(_mix(words ^ _mix(place)).sum().item()) & DIGEST_MASK


K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class Digests(Generic[K]):
    """Digests under way. Not thread-safe: the thread that computes them owns it, and has a stream of its own for them.

    On an NPU any thread's stream is the forward pass's unless it opens another: each chunk would wait for all the steps
    that are under way.
    """

    device: Device
    """The rank's."""
    _stream: Stream | None = None
    _sums: dict[K, Iterator[int]] = field(default_factory=dict)
    _totals: dict[K, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._sums)

    def start(self, key: K, sums: Iterator[int], where: torch.device) -> None:
        """Begin the digest that ``sums`` add up to, which read the memory of ``where`` as they are iterated."""
        self._stream = self._stream or self.device.open_stream(where)
        self._sums[key], self._totals[key] = sums, 0

    def drop(self, key: K) -> None:
        """The digest is not wanted any more; its memory is not read again."""
        self._sums.pop(key, None)
        self._totals.pop(key, None)

    @property
    def next_key(self) -> K | None:
        """The one that ``advance`` reads for."""
        return next(iter(self._sums), None)

    def advance(self) -> int | None:
        """Read one chunk of the oldest; its digest once it is whole."""
        assert self._stream is not None, "nothing was started"
        key = next(iter(self._sums))
        with self._stream:
            part = next(self._sums[key], None)
        if part is not None:
            self._totals[key] = (self._totals[key] + part) & DIGEST_MASK
            return None
        total = self._totals[key]
        self.drop(key)
        return total


class PushDigests:
    """Of one lane: what its pushes have in the source. Lane thread only."""

    def __init__(self, reader: KvReader | None, device: Device) -> None:
        """``reader``: of the rank's own KV; None where no content can be compared."""
        self._reader = reader
        self._asked: deque[LivePush] = deque()
        self._digests: Digests[PushKey] = Digests(device)
        self.decode_layout: RankLayout | None = None
        """Of the rank that the lane serves, once it has said it."""

    @property
    def is_busy(self) -> bool:
        return len(self._asked) + len(self._digests) > 0

    def ask(self, live: LivePush) -> None:
        """Every byte of this push is acknowledged: it waits for its digest."""
        self._asked.append(live)

    def advance(self, book: PushBook, now: float) -> None:
        """Read one chunk for one push: others need not wait for all of it."""
        while self._asked:
            self._start(self._asked.popleft(), book, now)
        if (key := self._digests.next_key) is None:
            return
        live = book.get(key)
        if live is None or not live.push.may_write:
            self._digests.drop(key)  # Its blocks may be another request's by now.
        elif (digest := self._digests.advance()) is not None:
            book.apply(live, live.push.digested(digest))

    def _start(self, live: LivePush, book: PushBook, now: float) -> None:
        if self._reader is None or self.decode_layout is None or live.content is None:
            reason = "this prefill rank cannot read its own KV, so that its content cannot be compared"
            book.apply(live, live.push.give_up(reason, now=now))
            return
        parts = parts_pushed(self._reader.layout, self.decode_layout)
        sums = self._reader.sums(parts, live.content, live.push.key.transfer_id)
        self._digests.start(live.push.key, sums, self._reader.where)


class ReceiveDigests:
    """Of one decode rank: what has arrived. Receiver thread only."""

    def __init__(self, reader: KvReader | None, device: Device) -> None:
        """``reader``: of the rank's own KV; None where no content can be compared."""
        self._reader = reader
        self._wanted: dict[TransferId, ContentOrder] = {}
        """Of requests whose content is compared and whose wait has not ended."""
        self._digests: Digests[tuple[TransferId, Attempt]] = Digests(device)

    @property
    def is_busy(self) -> bool:
        return len(self._digests) > 0

    def expect(self, transfer: TransferId, order: ContentOrder | None) -> None:
        """This transfer was announced."""
        if order is not None:
            self._wanted[transfer] = order

    def forget(self, transfer: TransferId) -> bool:
        """Forget a transfer whose wait is over. Whether its content was to be compared."""
        return self._wanted.pop(transfer, None) is not None

    def start(self, transfer: TransferId, attempt: Attempt, *, has_draft: bool) -> bool:
        """Every rank is done with this attempt. False: this rank cannot read its own KV.

        ``has_draft``: a draft model's KV came too.
        """
        if self._reader is None:
            return False
        parts, order = parts_received(self._reader.layout, has_draft=has_draft), self._wanted[transfer]
        self._digests.start((transfer, attempt), self._reader.sums(parts, order, transfer), self._reader.where)
        return True

    def advance(self) -> tuple[TransferId, Attempt, int] | None:
        """Read one chunk for one attempt: others need not wait for all of it. Its digest once it is whole."""
        if (key := self._digests.next_key) is None:
            return None
        if key[0] not in self._wanted:
            self._digests.drop(key)  # Its wait has ended: its blocks may be another request's by now.
            return None
        digest = self._digests.advance()
        return None if digest is None else (*key, digest)


def _signed(number: int) -> int:
    """As int64 has it."""
    return number - (1 << 64) if number >> 63 else number


_P: Final = _signed(0x9E3779B97F4A7C15)
_Q: Final = _signed(0xC2B2AE3D27D4EB4F)
_R: Final = _signed(0x165667B19E3779F9)
_A: Final = _signed(0xFF51AFD7ED558CCD)
_B: Final = _signed(0xC4CEB9FE1A85EC53)


def _number_of(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=_WORD_BYTES).digest(), "little", signed=True)


def _words_of(content: torch.Tensor) -> torch.Tensor:
    """[positions, heads, words], int64; the last word of a cell filled up with zeros."""
    if odd := content.shape[-1] % _WORD_BYTES:
        content = torch.nn.functional.pad(content, (0, _WORD_BYTES - odd))
    return content.contiguous().view(torch.int64)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of MurmurHash3 (public domain), word by word: a bijection."""
    x = (x ^ _shifted(x)) * _A
    x = (x ^ _shifted(x)) * _B
    return x ^ _shifted(x)


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """Right by 33 bits as if unsigned."""
    return (x >> 33) & ((1 << 31) - 1)
