"""One round on tensors: gather from the KV cache, all-to-all inside the prefill TP group, place in staging.

Only whole pieces are gathered from the cache (``index_select`` over its first dimension). Heads are then cut out of the
small result: if they were cut out of the cache, Ascend would copy the whole cache to make the cut contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist

from pdcluster_connector.reshard.feeds import TokenShape
from pdcluster_connector.reshard.rounds import Gather, Pieces, RegionRound, Round, StagingPlace
from pdcluster_protocol.errors import ConfigError

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""The word of each size in bytes. Kernels move elements, so bytes move as the widest words that fit all sizes and
offsets."""


@dataclass(slots=True, eq=False)
class TokenRegion:
    """One layer's KV in this rank. ``data``: uint8 [bytes of the region], borrowed from vLLM while the engine runs."""

    data: torch.Tensor
    shape: TokenShape
    group: int
    _views: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def num_heads(self) -> int:
        """KV heads of this rank."""
        return self.shape.pages.token_bytes // self.shape.cell_bytes

    @property
    def word_bytes(self) -> int:
        """Bytes of the widest word (8 at most) that divides a cell, the strides and the region's address."""
        pages = self.shape.pages
        sizes = (self.shape.cell_bytes, pages.page_stride, pages.block_stride, self.data.data_ptr(), 8)
        return math.gcd(*sizes)

    def step_bytes(self, piece_tokens: int) -> int:
        """A divisor of the offsets of all pieces."""
        pages = self.shape.pages
        steps = [pages.block_stride, piece_tokens * pages.token_bytes]
        if pages.pages_per_block > 1:
            steps.append(pages.page_stride)
        return math.gcd(*steps)

    def pieces(self, piece_tokens: int, word_bytes: int) -> torch.Tensor:
        """Words [step, token, head, cell]: row ``k`` is the piece that begins ``k`` steps (``step_bytes``) into the
        region. Without padding a step is a piece and the tensor is contiguous; else rows overlap."""
        key = (piece_tokens, word_bytes)
        if key not in self._views:
            self._views[key] = self._view(piece_tokens, word_bytes)
        return self._views[key]

    def _view(self, piece_tokens: int, word: int) -> torch.Tensor:
        token, cell = self.shape.pages.token_bytes // word, self.shape.cell_bytes // word
        step = self.step_bytes(piece_tokens)
        rows = (self.data.numel() - piece_tokens * token * word) // step + 1
        usable = self.data[: self.data.numel() // word * word].view(_WORDS[word])
        sizes, strides = (rows, piece_tokens, self.num_heads, cell), (step // word, token, cell, 1)
        return usable.as_strided(sizes, strides, usable.storage_offset())


def region_bytes(tensor: torch.Tensor, base: int, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes]: the memory at address ``base``, in the storage of ``tensor`` (a KV cache of vLLM).

    Raises:
        ConfigError: The memory reaches beyond the storage. (``set_`` would then move the whole storage.)
    """
    storage = tensor.untyped_storage()
    end, storage_end = base + num_bytes, storage.data_ptr() + storage.nbytes()
    if base < storage.data_ptr() or end > storage_end:
        raise ConfigError(
            f"KV of {num_bytes} bytes at {base:#x} reaches over its storage, which ends at {storage_end:#x}"
        )
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, base - storage.data_ptr(), (num_bytes,), (1,))


def open_reshard_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A group for the resharder alone: collectives of other threads must not mix with its own.

    Engine start. Every process of the default group calls this for every TP group, in the same order, and waits for the
    others. ``timeout_s`` bounds one round. It must be longer than the resharder's ``wait_s``, by which a rank may be
    late.
    """
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
    return group


def close_reshard_group(group: dist.ProcessGroup) -> None:
    """Ranks that wait for us in this group fail: at once with gloo, by the group's timeout with NCCL and HCCL."""
    group.abort()
    dist.destroy_process_group(group)


@dataclass(slots=True, eq=False)
class Indices:
    """The rows of each ``Pieces``, on the device. One object serves all layers of one shape in a step."""

    device: torch.device
    _rows: dict[tuple[int, int], tuple[Pieces, torch.Tensor]] = field(default_factory=dict)

    def rows(self, region: TokenRegion, pieces: Pieces) -> torch.Tensor:
        """int64 [pieces]: their rows in ``region.pieces(...)``."""
        step = region.step_bytes(pieces.piece_tokens)
        key = (id(pieces), step)
        if key not in self._rows:
            # The pieces are kept beside their rows, so that no other object gets their id.
            self._rows[key] = pieces, torch.from_numpy(pieces.sources // step).to(self.device)
        return self._rows[key][1]


@dataclass(slots=True, eq=False)
class Scratch:
    """Buffers for outgoing and incoming bytes, kept from round to round. One round at a time uses them.

    They grow to the largest round. Page faults of fresh memory would cost more than the copy into it.
    """

    device: torch.device
    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def buffer(self, name: str, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] with arbitrary content."""
        if name not in self._buffers or self._buffers[name].numel() < num_bytes:
            self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffers[name][:num_bytes]


class Regrouping:
    """One round for one layer, in two halves: between them, while bytes travel, the resharder takes space in staging.

    Resharder thread only, within the side stream.
    """

    def __init__(self, planned: Round, regions: Sequence[TokenRegion], indices: Indices, scratch: Scratch) -> None:
        self._planned = planned
        self._regions = regions
        self._indices = indices
        self._scratch = scratch
        self._word = math.gcd(*(region.word_bytes for region in regions))
        self._gathered: dict[tuple[int, int], torch.Tensor] = {}
        self._send_bases = _bases([share.sends for share in planned.regions])
        self._receive_bases = _bases([share.receives for share in planned.regions])
        self._received = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self, group: dist.ProcessGroup) -> None:
        """Our bytes of the round are on their way to the other ranks. Does not wait for those ranks.

        Raises:
            RuntimeError: The group is broken.
        """
        sends = _sums([share.sends for share in self._planned.regions])
        receives = _sums([share.receives for share in self._planned.regions])
        outgoing = self._scratch.buffer("outgoing", sum(sends))
        self._received = self._scratch.buffer("incoming", sum(receives))
        self._gather(outgoing)
        self._work = dist.all_to_all_single(self._received, outgoing, receives, sends, group=group, async_op=True)

    def finish(self) -> None:
        """The other ranks' bytes are here. On an accelerator they are here for later work on the side stream only.

        Waits up to the group's timeout. Once the side stream is done too, nothing reads the gathered memory any more.

        Raises:
            RuntimeError: Another rank ended or was late.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None

    def place(self, buffer: torch.Tensor) -> None:
        """``buffer`` (uint8 [planned.staged_bytes]) holds our parts in decode's order of bytes."""
        start = 0
        for index, share in enumerate(self._planned.regions):
            self._place(index, share, buffer[start : start + share.staged_bytes])
            start += share.staged_bytes

    def _gather(self, outgoing: torch.Tensor) -> None:
        for index, share in enumerate(self._planned.regions):
            for gather in share.gathers:
                start = self._send_bases[index][gather.peer] + gather.offset
                self._copy(index, gather, outgoing[start:])

    def _copy(self, index: int, gather: Gather, target: torch.Tensor) -> None:
        """``target`` (uint8, long enough) begins with the cells that ``gather`` names, side by side."""
        region, pieces, heads = self._regions[index], gather.pieces, gather.heads
        shape = (len(pieces.sources), pieces.piece_tokens, len(heads), region.shape.cell_bytes)
        flat = self._words(target, shape)
        if len(heads) == region.num_heads:
            view = region.pieces(pieces.piece_tokens, self._word)
            torch.index_select(view, 0, self._indices.rows(region, pieces), out=flat)
        else:
            flat.copy_(self._whole(index, pieces)[:, :, heads.start : heads.stop])

    def _whole(self, index: int, pieces: Pieces) -> torch.Tensor:
        """``pieces`` with all heads of this rank, gathered once for all ranks that want some of them."""
        key = (index, id(pieces))
        if key not in self._gathered:
            region = self._regions[index]
            view = region.pieces(pieces.piece_tokens, self._word)
            self._gathered[key] = torch.index_select(view, 0, self._indices.rows(region, pieces))
        return self._gathered[key]

    def _place(self, index: int, share: RegionRound, buffer: torch.Tensor) -> None:
        cell_bytes = self._regions[index].shape.cell_bytes
        for copy in share.copies:
            whole = self._whole(index, copy.pieces)
            self._slot(buffer, copy.place, cell_bytes).copy_(whole[:, :, copy.heads.start : copy.heads.stop])
        for landing in share.landings:
            place, start = landing.place, self._receive_bases[index][landing.peer] + landing.offset
            shape = (place.num_pieces, place.piece_tokens, len(place.heads), cell_bytes)
            self._slot(buffer, place, cell_bytes).copy_(self._words(self._received[start:], shape))

    def _slot(self, buffer: torch.Tensor, place: StagingPlace, cell_bytes: int) -> torch.Tensor:
        """The heads that ``place`` names, in ``buffer``: words [piece, token, head, cell]."""
        shape = (place.num_pieces, place.piece_tokens, place.num_heads, cell_bytes)
        return self._words(buffer[place.offset :], shape)[:, :, place.heads.start : place.heads.stop]

    def _words(self, data: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
        """The first bytes of ``data`` (uint8) as words of ``shape``, whose last size is given in bytes."""
        flat = data[: math.prod(shape)].view(_WORDS[self._word])
        return flat.view(*shape[:3], shape[3] // self._word)


def _bases(per_region: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """For each region, where its bytes for each peer begin. All regions' bytes for one peer lie side by side."""
    peer_starts = list(accumulate(_sums(per_region), initial=0))[:-1]
    bases = []
    for counts in per_region:
        bases.append(list(peer_starts))
        peer_starts = [start + count for start, count in zip(peer_starts, counts, strict=True)]
    return bases


def _sums(per_region: Sequence[tuple[int, ...]]) -> list[int]:
    return [sum(counts) for counts in zip(*per_region, strict=True)]
