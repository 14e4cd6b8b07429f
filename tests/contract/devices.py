"""The devices that ``test_device.py`` holds to one contract, each with work that takes as long as a test needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fakes.async_device import DeviceTensor, async_device
from pdcluster_connector.device import CpuDevice, Device, select_device

End: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class Bench:
    """A device on which tests can compute."""

    device: Device
    where: torch.device
    new: Callable[[], torch.Tensor]
    """Device memory of eight bytes, all 0."""
    read: Callable[[torch.Tensor], list[int]]
    """What is in such memory."""
    slow: Callable[[], End] | None = None
    """As ``begin_slow_work``. None: all work is over when its call returns."""

    def begin_slow_work(self) -> End:
        """The current stream is busy until the answer is called, or until it ends by itself, much later."""
        assert self.slow is not None
        return self.slow()


@contextmanager
def cpu_bench() -> Iterator[Bench]:
    """The engine's CPU."""
    yield Bench(CpuDevice(), torch.device("cpu"), lambda: torch.zeros(8, dtype=torch.uint8), torch.Tensor.tolist)


@contextmanager
def async_bench() -> Iterator[Bench]:
    """The device of our tests."""
    with async_device() as (device, runtime):

        def slow() -> End:
            stream = runtime.current_stream()
            stream.synchronize()
            stream.hold()
            stream.give(lambda: None)
            return stream.release

        def read(tensor: torch.Tensor) -> list[int]:
            assert isinstance(tensor, DeviceTensor), "the host's memory"
            return torch.Tensor.tolist(tensor.plain)

        def new() -> torch.Tensor:
            return runtime.tensor(torch.zeros(8, dtype=torch.uint8))

        yield Bench(device, torch.device("cpu"), new, read, slow)


@contextmanager
def accelerator_bench() -> Iterator[Bench]:
    """CUDA or an NPU, where there is one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None

    def slow() -> End:
        much = torch.ones((8192, 8192), device=found)
        for _ in range(64):
            much = much @ much
        return lambda: None

    def new() -> torch.Tensor:
        return torch.zeros(8, dtype=torch.uint8, device=found)

    yield Bench(select_device(found.type), found, new, torch.Tensor.tolist, slow)
