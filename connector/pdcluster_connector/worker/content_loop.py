"""The sums of ``content_pass.py`` in one compiled pass over the host's own memory.

Numba, which vLLM brings along, compiles the loop for this machine once, before the engine serves. It does so only where
``content_check`` is ``full``: compiling takes a core 2 s and 125 MiB, and would save a sample only half a millisecond.
The loop checks no bounds: every index is checked before. It does not hold the interpreter lock. It reads at once and in
no stream, so it serves plain CPU tensors only: not an accelerator's, and not those of a tensor subclass whose
operations run later.

Without a loop (Numba is missing, does not fit its NumPy, cannot compile) PyTorch's operators find the same sums.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pdcluster_connector.worker.content_pass import PartSums
from pdcluster_protocol.params import ContentCheck

_LOG: Final = logging.getLogger("vllm.pdcluster.content")
LOOP_BYTES: Final = 1 << 21
"""The bytes that one call sums up in a fraction of a millisecond. The overhead of the call is a small part of that."""

Int64s: TypeAlias = npt.NDArray[np.int64]
Loop: TypeAlias = Callable[
    [Int64s, tuple[int, int, int], Int64s, Int64s, Int64s, Int64s, Int64s, Int64s, int, Int64s, Int64s], None
]


def loop_for(views: Iterable[torch.Tensor], check: ContentCheck) -> Loop | None:
    """The loop by which a rank with ``views`` finds sums if the engine is set to ``check``; None: operators do.

    Engine start: may take seconds.
    """
    return compiled_loop() if check is ContentCheck.FULL and any(map(_is_plain, views)) else None


@lru_cache(maxsize=1)
def compiled_loop() -> Loop | None:
    """``add_pages``, compiled; None where Numba cannot. The first call takes seconds."""
    try:
        return _compile()
    except Exception as error:  # noqa: BLE001  # whatever Numba or its compiler raises: there is another way
        _LOG.warning("sums of content not compiled, three times as slow on a CPU reason=%s", error)
        return None


def plain_pass(sums: PartSums, loop: Loop | None) -> PlainPass | None:
    """A pass that counts pages of ``sums`` by ``loop``; None: only ``sums.add_by_operators`` can count them.

    Raises:
        IndexError: An index in ``sums`` is out of bounds, or lengths do not fit.
    """
    if loop is None or not _is_plain(sums.content) or not _has_whole_words(sums):
        return None
    _require_inside(sums)
    return _prepared(loop, sums)


@dataclass(frozen=True, slots=True)
class PlainPass:
    """``sums`` in the loop's types, over the same memory. ``others``: the loop's arguments after the pages."""

    loop: Loop
    words: Int64s
    strides: tuple[int, int, int]
    numbers: Int64s
    weights: Int64s
    slots: Int64s
    others: tuple[Int64s, Int64s, Int64s, int, Int64s, Int64s]

    def add(self, now: slice) -> None:
        """Adds the pages ``now`` to the sums: at once, and in the calling thread."""
        self.loop(self.words, self.strides, self.numbers[now], self.weights[now], self.slots[now], *self.others)


def add_pages(
    words: Any,
    strides: Any,
    numbers: Any,
    weights: Any,
    slots: Any,
    factors: Any,
    units: Any,
    heads: Any,
    step: int,
    rows: Any,
    ranges: Any,
) -> None:
    """Adds each token of the pages ``numbers`` to the sums ``rows`` and ``ranges``. Checks no bounds.

    ``words``: the memory, int64. ``strides``: words from page to page, row to row, token to token. ``weights``,
    ``slots``: ``[pages, tokens]``. ``factors``: one for each word of a cell. ``units``: one for each row of a page.
    ``heads``: one for each sum in ``rows``. ``step``: 1: each row has its own sum; 0: all rows have one. Numba compiles
    this: loops over numbers, and nothing else.
    """
    for page in range(len(numbers)):
        for row in range(len(units)):
            first = numbers[page] * strides[0] + row * strides[1]
            of_row = 0
            for token in range(weights.shape[1]):
                weight = weights[page, token]
                if weight == 0:
                    continue
                begin = first + token * strides[2]
                cell = words[begin : begin + len(factors)]
                value = 0
                for place in range(len(factors)):
                    value += (cell[place] + (cell[place] >> 32)) * factors[place]
                value *= weight * units[row]
                of_row += value
                ranges[slots[page, token]] += value * heads[row * step]
            rows[row * step] += of_row


def _compile() -> Loop | None:
    import numba  # imported only here: the import takes 0.7 s of a core, and few engines need it

    if numba.config.DISABLE_JIT:
        return None
    line, table, number = numba.int64[::1], numba.int64[:, ::1], numba.int64
    strides = numba.types.UniTuple(number, 3)
    types = numba.void(line, strides, line, table, table, line, line, line, number, line, line)
    loop: Loop = numba.njit(types, nogil=True)(add_pages)
    return loop


def _is_plain(view: torch.Tensor) -> bool:
    """Whether the host may read ``view`` by its address at any time. A tensor subclass may have work under way."""
    return type(view) is torch.Tensor and view.device.type == "cpu"


def _has_whole_words(sums: PartSums) -> bool:
    """Whether the cells are words that lie side by side, one cell for each weight of a page."""
    content, weights = sums.content, sums.pages.weights
    is_words = content.dtype is torch.int64 and content.stride(-1) == 1 and content.numel() > 0
    return is_words and weights.shape[1] == content.shape[2]


def _prepared(loop: Loop, sums: PartSums) -> PlainPass:
    content, pages = sums.content, sums.pages
    units = torch.ones(content.shape[1], dtype=torch.int64) if sums.units is None else sums.units
    step = 1 if sums.units is None else 0  # units add up to one row
    others = (sums.factors.numpy(), _line(units), _line(sums.heads), step, sums.rows.numpy(), sums.ranges.numpy())
    page, row, token, _ = content.stride()
    numbers, weights, slots = (tensor.numpy() for tensor in (pages.numbers, pages.weights, pages.slots))
    return PlainPass(loop, _memory(content), (page, row, token), numbers, weights, slots, others)


def _require_inside(sums: PartSums) -> None:
    """Every index by which the loop reads or writes is within bounds.

    Raises:
        IndexError: An index is not, or lengths do not fit.
    """
    pages, num_rows = sums.pages, sums.content.shape[1]
    _require_below(sums.content.shape[0], pages.numbers, "page")
    _require_below(len(sums.ranges), pages.slots, "range")
    if not pages.weights.shape == pages.slots.shape == (len(pages.numbers), sums.content.shape[2]):
        raise IndexError(f"{len(pages.numbers)} pages have weights {pages.weights.shape}, slots {pages.slots.shape}")
    num_sums = num_rows if sums.units is None else 1
    num_units = num_rows if sums.units is None else len(sums.units)
    if (len(sums.rows), len(sums.heads), num_units) != (num_sums, num_sums, num_rows):
        raise IndexError(f"{num_rows} rows have {len(sums.rows)} sums, {len(sums.heads)} heads, {num_units} units")


def _require_below(num: int, numbers: torch.Tensor, what: str) -> None:
    if not numbers.numel():
        return
    first, last = int(numbers.min()), int(numbers.max())
    if first < 0 or last >= num:
        raise IndexError(f"content of {what}s {first} to {last} is asked for: there are {num}")


def _memory(content: torch.Tensor) -> Int64s:
    """The memory from the first word of ``content`` to its last, and no more."""
    last = sum((size - 1) * stride for size, stride in zip(content.shape, content.stride(), strict=True))
    return _line(content.as_strided((last + 1,), (1,), content.storage_offset()))


def _line(tensor: torch.Tensor) -> Int64s:
    line: Int64s = tensor.reshape(-1).numpy()
    return line
