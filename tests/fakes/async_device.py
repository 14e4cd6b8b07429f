"""A device for tests whose work runs beside the host, behind the connector's own ``Runtime``.

    AsyncRuntime   streams, and which one a thread is in, for ``AcceleratorDevice``
    DeviceTensor   the device's memory: what a host thread does with it is given to the thread's stream

The memory is the host's, so that a transport reads and writes it by its address at any time, as it does a device's.
PyTorch's dispatcher shows each operation. A view is made at once, and so is new memory, with what was there before. An
operation whose answer the host needs waits for the stream first. All others are queued.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from fakes.late_errors import LateErrors
from fakes.streams import AsyncStream, is_stream_thread
from pdcluster_connector.device import AcceleratorDevice

_OURS: Final = "pdcluster-"
"""Of the names of the connector's threads."""
STALE: Final = 0xEE
"""What new memory holds: a byte of something that was there before."""
_NEEDS_VALUES: Final = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class DeviceTensor(torch.Tensor):
    """Memory of a device. ``plain``: the same memory as the host has it."""

    runtime: AsyncRuntime
    plain: torch.Tensor

    def cpu(self) -> torch.Tensor:  # type: ignore[override]  # PyTorch's takes a memory format too
        """A copy in the host's memory, once the thread's stream has come so far."""
        self.runtime.synchronize()
        with _disable_current_modes():
            return self.plain.clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch's stub has a static method here
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeviceTensor))
        return next(tensors).runtime.launch(func, args, kwargs or {})


class AsyncRuntime:
    """As PyTorch is for CUDA. Close it: its streams are threads."""

    def __init__(self) -> None:
        self._current = threading.local()
        self.late = LateErrors()
        """What a test lets fail."""
        self.devices: list[torch.device] = []
        """What threads have entered."""
        self.streams: list[AsyncStream] = []
        """In the order in which they were made; the first is the one of every thread that has not entered another."""
        self.default = self._open("default")

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def enter_device(self, device: torch.device) -> None:
        self.late.tell()
        self._current.device = device
        self.devices.append(device)

    def _require_entered(self) -> None:
        """As an NPU, which knows no device in a thread that has not named one."""
        thread = threading.current_thread().name
        if thread.startswith(_OURS) and not hasattr(self._current, "device"):
            raise RuntimeError(f"thread {thread} has not entered the device")

    def current_stream(self) -> AsyncStream:
        stream: AsyncStream = getattr(self._current, "stream", self.default)
        return stream

    def new_stream(self, device: torch.device) -> AsyncStream:
        self.enter_device(device)
        return self._open(f"side-{len(self.streams)}")

    def tensor(self, plain: torch.Tensor) -> DeviceTensor:
        """``plain`` as memory of this device."""
        made = torch.Tensor._make_subclass(DeviceTensor, plain)
        made.runtime, made.plain = self, plain
        return made

    def launch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One operation of the calling thread."""
        assert not is_stream_thread(), "a stream's own work was given to a stream"
        self.late.tell()
        host_args, host_kwargs = tree_map(_plain, (tuple(args), dict(kwargs)))
        work = partial(func, *host_args, **host_kwargs)
        stream = self.current_stream()
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
            return self._wrapped(tree_map(_stale if "empty" in func.__name__ else _same, work()))
        if _is_view(func):
            return self._wrapped(work())
        if _answers_host(func):
            self.synchronize()
            return self._wrapped(work())
        if func._schema.is_mutable:
            stream.give(work)
            return kwargs.get("out", args[0])
        # For its shape alone: PyTorch's shape inference takes seconds to import.
        made = tree_map(_stale, work())
        stream.give(partial(_fill, made, work))
        return self._wrapped(made)

    def synchronize(self) -> None:
        """The thread's stream has done all that it was given."""
        self.current_stream().synchronize()
        self.late.tell()

    def release(self) -> None:
        """All streams run freely."""
        for stream in self.streams:
            stream.release()

    def close(self) -> None:
        """End all streams. What was not done is never done."""
        for stream in self.streams:
            stream.stop()
        for stream in self.streams:
            stream.join()

    def _open(self, name: str) -> AsyncStream:
        stream = AsyncStream(name, self._entered, self._require_entered, self.late)
        self.streams.append(stream)
        return stream

    @contextmanager
    def _entered(self, stream: AsyncStream) -> Iterator[None]:
        former = self.current_stream()
        self._current.stream = stream
        try:
            with _Launches(self):
                yield
        finally:
            self._current.stream = former

    def _wrapped(self, result: Any) -> Any:
        return tree_map(lambda leaf: self.tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's
    """Within a stream also memory is the device's that was made there."""

    def __init__(self, runtime: AsyncRuntime) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self._runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._runtime.launch(func, args, kwargs or {})


@contextmanager
def async_device() -> Iterator[tuple[AcceleratorDevice, AsyncRuntime]]:
    """The connector's own device class, over a runtime that runs beside the host."""
    runtime = AsyncRuntime()
    try:
        yield AcceleratorDevice(runtime, 1), runtime
    finally:
        runtime.close()


def _is_view(func: Any) -> bool:
    """Whether it looks at its argument's memory in another shape, and reads none."""
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _answers_host(func: Any) -> bool:
    """Whether the host cannot go on without what the operation finds in memory."""
    gives_tensors = all("Tensor" in str(value.type) for value in func._schema.returns)
    return not gives_tensors or any(tag in func.tags for tag in _NEEDS_VALUES)


def _plain(leaf: Any) -> Any:
    return leaf.plain if isinstance(leaf, DeviceTensor) else leaf


def _stale(made: Any) -> Any:
    """New memory, of any type: its bytes are STALE."""
    made.untyped_storage().fill_(STALE)
    return made


def _same(made: Any) -> Any:
    return made


def _fill(made: Any, work: Any) -> None:
    for target, value in zip(tree_leaves(made), tree_leaves(work()), strict=True):
        target.copy_(value)
