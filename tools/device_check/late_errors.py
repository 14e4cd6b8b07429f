"""Lets kernels fail while pushes are under way (decision 0033). Pushes of their KV must not succeed; all must end.

After a CUDA error a process has lost its device for good. So each case has a process of its own, and decode another.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Final, TypeAlias

import torch
from benchmarks.block_tables import Placement, block_tables
from benchmarks.kv_shape import KvShape
from benchmarks.ranks import Request
from tools.device_check.pair import Pair, PushFailed, Source, fail_kernel, open_pair
from tools.device_check.where import Work, asked_device, leave_out, synchronize

from pdcluster_protocol.params import ContentCheck

SHAPE: Final = KvShape(block_size=16, num_blocks=80, num_layers=8)
TP: Final = (1, 2)
"""Two lanes: one of them hears of the other's error."""
BLOCKS: Final = 16
BUSY_MS: Final = {"cpu": 1, "cuda": 10, "npu": 10}
FAILS_IN: Final = 3
"""The layer in which the kernel fails."""
END_S: Final = 20.0
"""Seconds within which all requests that the error costs must end."""
_CASE_S: Final = 27.0
_CUDA_ONLY: Final = "prefill, an address that there is not"
"""PyTorch takes memory by its address for CUDA only."""
Case: TypeAlias = Callable[["Pair", "Report"], None]


@dataclass(slots=True)
class Report:
    """The findings of a case. ``wrong``: faults; ``seen``: other facts worth a line."""

    wrong: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "; ".join([*(f"WRONG: {one}" for one in self.wrong), *self.seen])


def main() -> int:
    where = asked_device()
    if where.type == "cpu":
        leave_out("a CPU's kernel fails in its own call: tests/integration/test_device_check.py has a device for it")
    names = [name for name in CASES if where.type == "cuda" or name != _CUDA_ONLY]
    reports = [in_a_process(name, where) for name in names]
    for name, report in zip(names, reports, strict=True):
        print(f"{name}: {report.text}")
    num_bad = sum(bool(report.wrong) for report in reports)
    print(f"{len(reports)} kernels failed; after {num_bad} of them something was wrong")
    return 1 if num_bad else 0


def in_a_process(name: str, where: torch.device) -> Report:
    """Run a case in a process of its own, for at most ``_CASE_S``."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run_case, args=(name, where, there))
    process.start()
    there.close()
    try:
        report: Report = here.recv() if here.poll(_CASE_S) else Report([f"no end after {_CASE_S:g} s"])
    except EOFError:
        report = Report(["the process died"])
    process.kill()
    process.join()
    return report


def _run_case(name: str, where: torch.device, pipe: Connection) -> None:
    if where.type != "cpu":
        torch.accelerator.set_device_index(where)
    report, ended = Report(), time.monotonic()
    try:
        with open_pair(where, SHAPE, TP) as pair:
            try_case(CASES[name], pair, report)
            ended = time.monotonic()
    except Exception as error:  # noqa: BLE001  # it is what the case found
        report.wrong.append(f"{type(error).__name__} at the end: {str(error).splitlines()[0]}")
    report.seen.append(f"closed after {time.monotonic() - ended:.1f} s")
    pipe.send(report)
    pipe.recv()  # we are killed here: PyTorch's own end with a broken device may abort


def try_case(case: Case, pair: Pair, report: Report) -> None:
    """Run a case. An exception in it is a fault too."""
    try:
        case(pair, report)
    except Exception as error:  # noqa: BLE001  # it is what the case found
        report.wrong.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def fail_on_prefill(fail: Callable[[Source], object], pair: Pair, report: Report) -> None:
    """A kernel of prefill's forward pass fails. Appends to ``report``."""
    before, compared, plain, after = requests = _prepared(pair, "before", "compared", "plain", "after")
    work = Work(pair.where)
    blocks = {one.name: torch.tensor(one.prefill_blocks, device=pair.where) for one in requests}
    synchronize(pair.where)

    def compute(names: tuple[str, ...], fails_in: int | None, source: Source, layer: int) -> None:
        work.give(BUSY_MS[pair.where.type])
        if layer == fails_in:
            fail(source)
        for name in names:
            source.compute(layer, blocks[name])

    pair.push(before, partial(compute, ("before",), None))
    _require_right(pair, before, report)
    began = time.monotonic()
    names = (compared.name, plain.name)
    is_told = _is_told(lambda: pair.push_all([compared, plain], partial(compute, names, FAILS_IN)))
    for one in (compared, plain):
        _require_lost(pair, one, began, report)
    is_told = _is_told(lambda: pair.push(after, partial(compute, (after.name,), None))) or is_told
    if is_told:
        _end_prefill(pair, report)
    _require_lost(pair, after, began, report)
    if not is_told:
        _require_released(pair, requests, report)


def fail_on_decode(pair: Pair, report: Report) -> None:
    """A kernel on decode fails while two requests are pushed to it. Appends to ``report``."""
    before, compared, plain = requests = _prepared(pair, "before", "compared", "plain")
    work = Work(pair.where)
    blocks = {one.name: torch.tensor(one.prefill_blocks, device=pair.where) for one in requests}
    synchronize(pair.where)

    def compute(names: tuple[str, ...], source: Source, layer: int) -> None:
        if layer == FAILS_IN and len(names) > 1:
            pair.spoil_decode(compared)
        work.give(BUSY_MS[pair.where.type])
        for name in names:
            source.compute(layer, blocks[name])

    pair.push(before, partial(compute, ("before",)))
    _require_right(pair, before, report)
    began = time.monotonic()
    pair.push_all([compared, plain], partial(compute, ("compared", "plain")))
    _require_lost(pair, compared, began, report)
    end = pair.end_of(plain)
    report.seen.append(f"not compared: {'received' if end.is_received else 'lost'} {end.said}".strip())
    _require_released(pair, requests, report)


def _prepared(pair: Pair, *names: str) -> list[Request]:
    """Requests of ``BLOCKS`` blocks each, made ready on both sides. No two requests share a block. The content of the
    request ``compared`` is checked in full."""
    counts = (BLOCKS,) * len(names)
    ours, theirs = (block_tables(Placement.USED, counts, SHAPE.num_blocks, seed) for seed in (1, 2))
    requests = [Request(*one) for one in zip(names, ours, theirs, strict=True)]
    requests = [replace(one, check=ContentCheck.FULL) if one.name == "compared" else one for one in requests]
    pair.prepare(*requests)
    return requests


def _is_told(step: Callable[[], object]) -> bool:
    """Run a forward pass. Returns whether its thread was told of the error."""
    try:
        step()
    except RuntimeError:
        return True
    return False


def _end_prefill(pair: Pair, report: Report) -> None:
    """Close prefill's ranks, as vLLM's engine does when it ends because its forward thread was told of the error."""
    began = time.monotonic()
    for source in pair.sources:
        source.end.close()
    report.seen.append(f"the forward thread was told, and the rank closed in {time.monotonic() - began:.2f} s")


def _require_right(pair: Pair, request: Request, report: Report) -> None:
    end = pair.end_of(request)
    if not end.is_received or end.said:
        report.wrong.append(f"{request.name}: {end.said or 'lost'}, before any kernel failed")


def _require_lost(pair: Pair, request: Request, began: float, report: Report) -> None:
    end = pair.end_of(request)
    if end.is_received:
        report.wrong.append(f"{request.name} was received {end.said}".strip())
    if (took_s := end.moment - began) > END_S:
        report.wrong.append(f"{request.name} ended after {took_s:.1f} s")
    report.seen.append(f"{request.name} ended after {took_s:.2f} s ({(end.said.splitlines() or [''])[0]})")


def _require_released(pair: Pair, requests: list[Request], report: Report) -> None:
    began = time.monotonic()
    try:
        pair.release(*requests)
    except PushFailed as error:
        report.wrong.append(str(error))
    report.seen.append(f"prefill's blocks free after {time.monotonic() - began:.2f} s more")


def _bad_index(source: Source) -> None:
    fail_kernel(source.cache.layers)


def _bad_address(source: Source) -> None:
    """Run a kernel that writes where no memory is: ``_Wild`` claims to be larger than the memory."""
    torch.as_tensor(_Wild(source.cache.address), device=source.cache.bytes.device)[-4096:].fill_(1)


class _Wild:
    """Claims that 16 TiB of a device's memory follow ``address``."""

    def __init__(self, address: int) -> None:
        shape = {"shape": (1 << 44,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}
        self.__cuda_array_interface__ = shape


CASES: Final[dict[str, Case]] = {
    "prefill, an index that there is not": partial(fail_on_prefill, _bad_index),
    _CUDA_ONLY: partial(fail_on_prefill, _bad_address),
    "decode, an index that there is not": fail_on_decode,
}


if __name__ == "__main__":
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    sys.exit(main())
