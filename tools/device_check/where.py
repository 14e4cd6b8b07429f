"""The device that ``--device`` names, and work for the checks to do on it."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Final, NoReturn

import torch
from tools.device_check.results import LEFT_OUT_STATUS

START_S: Final = 240.0
"""Seconds until another process must be there: it imports PyTorch, perhaps on a crowded machine."""
_SIDE: Final = {"cpu": 256, "cuda": 4096, "npu": 4096}
"""Side of a square matrix whose product takes a millisecond or a few: 2.7 ms on an H200."""


def asked_device() -> torch.device:
    """The first device of the kind that ``--device`` names. This thread uses it from now on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    name = parser.parse_args().device
    if name == "cpu":
        torch.set_num_threads(1)  # on a busy machine several threads wait for each other
        return torch.device("cpu")
    where = torch.device(name, 0)
    torch.accelerator.set_device_index(where)
    return where


def leave_out(why: str) -> NoReturn:
    """End the process: this check does not apply to the device."""
    print(why)
    sys.exit(LEFT_OUT_STATUS)


def synchronize(where: torch.device) -> None:
    """Wait until all work that was given to the device has ended."""
    if where.type != "cpu":
        torch.accelerator.synchronize(where)


class Work:
    """A layer's kernels: products of matrices."""

    def __init__(self, where: torch.device) -> None:
        side = _SIDE[where.type]
        self._factor = torch.full((side, side), 1 / side, device=where)
        self._product = torch.empty_like(self._factor)

    def give(self, count: int) -> None:
        """Keep the current stream busy with ``count`` products."""
        for _ in range(count):
            torch.mm(self._factor, self._factor, out=self._product)


def median_s(where: torch.device, repeats: int, *calls: Callable[[], object]) -> list[float]:
    """Median seconds of each call, with the work that it gives to the device. The calls take turns in each round.

    One more round goes before and does not count.
    """
    taken: list[list[float]] = [[] for _ in calls]
    for number in range(-1, repeats):
        for call, seconds in zip(calls, taken, strict=True):
            synchronize(where)
            began = time.perf_counter()
            call()
            synchronize(where)
            if number >= 0:
                seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in taken]
