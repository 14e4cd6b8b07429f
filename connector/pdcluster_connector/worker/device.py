"""When a layer's KV is really in memory: device events, recorded by the forward pass, looked at by lanes.

One object per device kind, chosen once at start. Accelerators (CUDA, Ascend NPU) go through PyTorch's
device-generic ``torch.Event`` and ``torch.accelerator``; on CPU a kernel has ended when its call returns.
"""

from __future__ import annotations

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
