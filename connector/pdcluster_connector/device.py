"""The engine's device: when a layer's KV is really in memory, and where the resharder's own work runs.

    Device      records events for the forward pass, which lanes query; opens side streams; counts faults
    Stream      takes one thread's work; a side stream runs beside the forward pass, never in its stream
    Runtime     makes an accelerator's streams: PyTorch's, or those of our tests

The device is chosen once at start. On CPU a kernel has ended when its call returns, so there is nothing to order. CUDA
and Ascend NPU are one class over PyTorch's device-generic streams. Every device and runtime passes
``tests/contract/test_device.py``. ``tests/integration`` has a race for each place that waits for an event.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from typing import Final, Protocol, TypeAlias

import torch

from pdcluster_protocol.errors import ConfigError


class StreamEvent(Protocol):
    """As ``torch.Event``."""

    def query(self) -> bool:
        """Whether the stream has done all work that it was given before the event. Any thread; never waits."""


DeviceEvent: TypeAlias = StreamEvent | None
"""None: already complete."""

_OF_THE_CALL: Final = (torch.OutOfMemoryError, NotImplementedError)
"""PyTorch raises these on an accelerator before it gives the device any work. Any other ``RuntimeError`` may be about
earlier work, which a device reports at any later call: CUDA's messages say so."""
_NPU_ALIGNMENT_BYTES: Final = 2 << 20
"""Mooncake's ``ascend`` protocol takes only memory that begins on a multiple of 2 MiB."""


class DeviceFault(RuntimeError):
    """The device reports that work has failed, but not which thread's. The device object has counted the error."""


class Device(Protocol):
    """The methods of the engine's device that the connector needs."""

    @property
    def registration_alignment_bytes(self) -> int:
        """Registered memory must begin on a multiple of this number."""

    def record(self) -> DeviceEvent:
        """An event that completes with all work given to the current stream so far. Forward thread; never waits.

        Raises ``DeviceFault``. vLLM's engine then ends; until it has ended, no lane says done.
        """

    def enter_thread(self) -> None:
        """The calling thread works for this device. A new thread that queries events or starts a transport calls this
        first: until then it works for the process's first device (CUDA) or for none (NPU), even if
        the rank has another.
        Raises ``DeviceFault``.
        """

    def is_done(self, event: DeviceEvent) -> bool:
        """Whether the event is complete. Raises ``DeviceFault``. Any thread that has entered the device; no wait."""

    def open_stream(self, device: torch.device) -> Stream:
        """A new side stream of ``device``. Only the calling thread may use it."""

    def is_of_its_call(self, error: Exception) -> bool:
        """Whether ``error`` is only about the call that raised it. If not, work of any thread may have failed."""

    def note(self, error: Exception) -> None:
        """Counts ``error`` as a fault unless it is only about its call, or counted already. Any thread, once for each
        error."""

    @property
    def num_faults(self) -> int:
        """Errors so far that may be about any thread's work. A device may report each error once, to the thread that
        asks next. Other threads learn of the error only here. Any thread."""


class Stream(AbstractContextManager[object], Protocol):
    """As ``torch.Stream``. Inside its ``with`` block the thread's device work goes to this stream."""

    def record_event(self) -> DeviceEvent:
        """An event that completes with all work given to this stream so far. Never waits."""


class CpuDevice:
    """The CPU: a kernel has written its output when its call returns."""

    registration_alignment_bytes = 1

    def record(self) -> DeviceEvent:
        return None

    def enter_thread(self) -> None:
        """A thread needs nothing for the CPU."""

    def is_done(self, event: DeviceEvent) -> bool:
        return event is None or bool(event.query())

    def open_stream(self, device: torch.device) -> Stream:  # noqa: ARG002  # the CPU has no streams
        return NoStream()

    def is_of_its_call(self, error: Exception) -> bool:  # noqa: ARG002  # whatever it is
        return True

    def note(self, error: Exception) -> None:
        """Counts nothing: on the CPU an operation fails in its own call."""

    @property
    def num_faults(self) -> int:
        return 0


class NoStream(nullcontext[None]):
    """CPU: an operation is over when its call returns."""

    def record_event(self) -> DeviceEvent:
        return None


class Runtime(Protocol):
    """The functions of PyTorch that the connector needs for CUDA or an NPU."""

    def current_device(self) -> torch.device:
        """The device of this thread."""

    def enter_device(self, device: torch.device) -> None:
        """``device`` becomes this thread's current device."""

    def current_stream(self) -> Stream:
        """The stream to which this thread's device work goes."""

    def new_stream(self, device: torch.device) -> Stream:
        """A stream that runs beside all others. ``device`` becomes the thread's current device."""


class TorchRuntime:
    """CUDA or NPU, by PyTorch's device-generic API."""

    def current_device(self) -> torch.device:
        return torch.accelerator.current_stream().device

    def enter_device(self, device: torch.device) -> None:
        # PyTorch 2.11 needs an index here. A device without an index is the first one, as in a new thread.
        torch.accelerator.set_device_index(device.index or 0)

    def current_stream(self) -> Stream:
        return torch.accelerator.current_stream()

    def new_stream(self, device: torch.device) -> Stream:
        self.enter_device(device)
        return torch.Stream(device)


class AcceleratorDevice:
    """CUDA or NPU: one event on the forward pass's stream for each layer."""

    def __init__(self, runtime: Runtime, registration_alignment_bytes: int) -> None:
        """To be called in a thread whose current device is the rank's, such as vLLM's worker thread."""
        self.registration_alignment_bytes = registration_alignment_bytes
        self._runtime = runtime
        self._device = runtime.current_device()
        self._num_faults = 0
        self._faults_lock = Lock()
        """Guards ``_num_faults``."""

    def enter_thread(self) -> None:
        try:
            self._runtime.enter_device(self._device)
        except RuntimeError as error:
            raise self._fault(error) from error

    def record(self) -> DeviceEvent:
        try:
            return self._runtime.current_stream().record_event()
        except RuntimeError as error:
            raise self._fault(error) from error

    def is_done(self, event: DeviceEvent) -> bool:
        try:
            return event is None or bool(event.query())
        except RuntimeError as error:
            raise self._fault(error) from error

    def open_stream(self, device: torch.device) -> Stream:
        return self._runtime.new_stream(device)

    def is_of_its_call(self, error: Exception) -> bool:
        return not isinstance(error, RuntimeError) or isinstance(error, _OF_THE_CALL)

    def note(self, error: Exception) -> None:
        if not (self.is_of_its_call(error) or isinstance(error, DeviceFault)):
            self._fault(error)

    @property
    def num_faults(self) -> int:
        return self._num_faults

    def _fault(self, error: Exception) -> DeviceFault:
        with self._faults_lock:
            self._num_faults += 1
        return DeviceFault(str(error))


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
    return AcceleratorDevice(TorchRuntime(), _NPU_ALIGNMENT_BYTES if device_type == "npu" else 1)
