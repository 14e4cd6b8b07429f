"""Adds the pages of one part to the sums of content, by PyTorch's operators.

    cell = sum over words of 8 bytes of  spread(word) * odd number of the word's place in the cell
    sum  = sum over cells of  cell * odd number of the token's position                             all modulo 2^64

``spread`` adds a word's top half to its low half, since a product modulo 2^64 keeps too little of the top bits. PyTorch
makes several passes over a copy, on any device and in the calling thread's stream. ``content_loop.py`` makes one pass,
only in the host's own memory. Both find the same sums. ``core/content.py`` decides which cells count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from pdcluster_connector.core.ranges import Offsets

CHUNK_BYTES: Final = 1 << 19
"""The bytes of one chunk, few enough that it stays in a core's cache between the passes."""
WORD_BYTES: Final = 8
GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of a region that hold counted cells. On the rank's device.

    ``weights``: each token's factor, 0 if it is not counted. ``slots``: the index of the range whose sum counts the
    token. Both ``[pages, tokens]``, int64.
    """

    numbers: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class PartSums:
    """A part's cells, and the sums that they go into. All on the rank's device.

    ``content``: ``[pages, KV heads or units, tokens, words or bytes]``, int64 or uint8, borrowed. ``factors``:
    ``[words]``, the factor of each word of a cell: ``factors_of``. ``units``: ``[units, 1]``, the factor of each unit
    of a state's run; None: rows are heads. ``rows``: int64, the sum of each head, or one of all units. ``heads``:
    ``[rows, 1]``, factors. ``ranges``: int64, all sums over ranges.
    """

    content: torch.Tensor
    pages: Pages
    factors: torch.Tensor
    units: torch.Tensor | None
    heads: torch.Tensor
    rows: torch.Tensor
    ranges: torch.Tensor

    def pages_of(self, num_bytes: int) -> int:
        """How many of the part's pages fit in ``num_bytes``; at least 1."""
        return max(1, num_bytes // max(1, self.content[:1].numel() * self.content.element_size()))

    def add_by_operators(self, now: slice) -> None:
        """Adds the slice ``now`` of ``pages`` to the sums, in the thread's current stream.

        Raises:
            IndexError: ``content`` lacks a page of the slice.
        """
        pages = self.pages
        sums = values_of(self.content.index_select(0, pages.numbers[now]), self.factors) * pages.weights[now, None]
        if self.units is not None:
            sums = (sums * self.units).sum(1, keepdim=True)
        self.rows.add_(sums.sum((0, 2)))
        of_tokens = (sums * self.heads).sum(1)
        self.ranges.index_add_(0, pages.slots[now].reshape(-1), of_tokens.reshape(-1))


def values_of(content: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """[pages, heads, tokens], int64: the value of each cell of ``content``, ``[pages, heads, tokens, bytes or words]``.

    ``content`` must be a copy: it is overwritten. ``factors``: one for each word of a cell.
    """
    words = content if content.dtype is torch.int64 else _words_of(content)
    words += words >> 32
    if words.device.type == "cpu":
        return torch.mv(words.view(-1, words.shape[-1]), factors).view(words.shape[:-1])
    return (words * factors).sum(-1)  # CUDA has no product of integer matrices


def as_words(view: torch.Tensor) -> torch.Tensor:
    """``view`` as words, which are quicker to read; ``view`` itself if its memory is not made of whole words."""
    places = (view.shape[-1], view.storage_offset(), *view.stride()[:-1])
    is_whole = view.stride(-1) == 1 and not any(place % WORD_BYTES for place in places)
    return view.view(torch.int64) if is_whole and view.data_ptr() % WORD_BYTES == 0 else view


def factors_of(content: torch.Tensor) -> torch.Tensor:
    """Odd factors, shape ``[words]``: one for each word of a cell of ``content``. On its device, in our stream.

    Factors are not kept for the next request: it may be summed up in another stream, which would not wait for this one.
    """
    size = content.shape[-1]
    num_words = size if content.dtype is torch.int64 else -(-size // WORD_BYTES)
    return torch.from_numpy(odd_numbers(np.arange(num_words), GOLDEN)).to(content.device)


def odd_numbers(numbers: np.ndarray, seed: int) -> Offsets:
    """A pseudo-random odd number for each of ``numbers``: the finaliser of MurmurHash3 (public domain)."""
    x = numbers.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(seed & _MASK)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    found: Offsets = ((x ^ (x >> np.uint64(33))) | np.uint64(1)).view(np.int64)
    return found


def _words_of(content: torch.Tensor) -> torch.Tensor:
    """[pages, heads, tokens, words], int64. The last word of a cell is filled up with zeros."""
    if odd := content.shape[-1] % WORD_BYTES:
        content = torch.nn.functional.pad(content, (0, WORD_BYTES - odd))
    return content.contiguous().view(torch.int64)
