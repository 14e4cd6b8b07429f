"""The engine's device: when a layer's KV is really in memory, and where the resharder's own work runs.

    Device      events, recorded by the forward pass, looked at by lanes
    SideStream  work of the resharder beside the forward pass, never in its stream

One object of each per device kind, chosen once at start. Accelerators (CUDA, Ascend NPU) go through PyTorch's
device-generic ``torch.Event`` and ``torch.accelerator``; on CPU a kernel has ended when its call returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Protocol, TypeAlias

import torch

from pdcluster_protocol.errors import ConfigError

DeviceEvent: TypeAlias = "torch.Event | None"
"""None: already complete."""

_NPU_ALIGNMENT_BYTES: Final = 2 << 20
"""Mooncake's ``ascend`` protocol takes memory from a multiple of 2 MiB on."""


class Device(Protocol):
    """What the connector needs of the engine's device."""

    @property
    def registration_alignment_bytes(self) -> int:
        """Registered memory must begin on a multiple of this."""

    def record(self) -> DeviceEvent:
        """An event that completes when all work given to the current stream so far has. Forward thread; never waits."""

    def is_done(self, event: DeviceEvent) -> bool:
        """Whether the event is complete. Any thread; never waits."""


class CpuDevice:
    """A kernel has written its output when its call returns."""

    registration_alignment_bytes = 1

    def record(self) -> DeviceEvent:
        return None

    def is_done(self, event: DeviceEvent) -> bool:
        return event is None or bool(event.query())


class AcceleratorDevice:
    """CUDA or NPU: one event on the forward pass's stream for each layer."""

    def __init__(self, device_type: str, registration_alignment_bytes: int) -> None:
        self.registration_alignment_bytes = registration_alignment_bytes
        self._device_type = device_type

    def record(self) -> DeviceEvent:
        event = torch.Event(self._device_type)
        event.record(torch.accelerator.current_stream())
        return event

    def is_done(self, event: DeviceEvent) -> bool:
        return event is None or bool(event.query())


def select_device(device_type: str) -> Device:
    """The device object for vLLM's ``device_type``. Engine start.

    Raises:
        ConfigError: PyTorch has no such device here.
    """
    if device_type == "cpu":
        return CpuDevice()
    if device_type == "npu" and find_spec("torch_npu"):
        import_module("torch_npu")
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != device_type:
        raise ConfigError(f"device type is {device_type!r}, which this PyTorch does not have: install its build for it")
    return AcceleratorDevice(device_type, _NPU_ALIGNMENT_BYTES if device_type == "npu" else 1)


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
