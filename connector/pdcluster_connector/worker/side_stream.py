"""Where the resharder's own work on the device runs: beside the forward pass, never in its stream.

One object per device kind, chosen once at start, as in ``device.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from pdcluster_connector.worker.device import DeviceEvent


class SideStream(Protocol):
    """Resharder thread only."""

    def current(self) -> AbstractContextManager[None]:
        """Within it, this thread's device work goes to the side stream."""

    def mark(self) -> DeviceEvent:
        """An event that completes when all work given to the side stream so far has. Never waits."""


class NoStream:
    """CPU: an operation is over when its call returns."""

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def mark(self) -> DeviceEvent:
        return None


class AcceleratorStream:
    """CUDA or NPU. Made in the resharder's thread: a thread's current device is its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.accelerator.set_device_index(device)
        self._stream = torch.Stream(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        with self._stream:
            yield

    def mark(self) -> DeviceEvent:
        event = torch.Event(self._device.type)
        event.record(self._stream)
        return event


def open_side_stream(device: torch.device) -> SideStream:
    """The side stream of ``device``. In the thread that will use it."""
    return NoStream() if device.type == "cpu" else AcceleratorStream(device)
