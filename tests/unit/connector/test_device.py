"""The choice of the device. What every device does: ``tests/contract/test_device.py``."""

from __future__ import annotations

import threading

import pytest
import torch

from fakes.async_device import async_device
from fakes.late_errors import Kind
from patience import until
from pdcluster_connector.device import CpuDevice, DeviceFault, TorchRuntime, select_device
from pdcluster_protocol.errors import ConfigError


def test_on_the_cpu_an_event_is_complete_when_it_is_recorded() -> None:
    device = select_device("cpu")
    assert isinstance(device, CpuDevice)
    assert device.is_done(device.record())
    assert device.registration_alignment_bytes == 1


@pytest.mark.parametrize("device_type", ["npu", "tpu"])
def test_a_device_that_pytorch_does_not_have_is_refused_by_name(device_type: str) -> None:
    with pytest.raises(ConfigError, match=f"device type is '{device_type}'.*install"):
        select_device(device_type)


def test_a_thread_is_for_the_device_of_the_thread_that_made_the_rank() -> None:
    with async_device() as (device, runtime):
        runtime.devices.clear()
        device.enter_thread()
        assert runtime.devices == [runtime.current_device()]


@pytest.mark.parametrize(
    ("error", "is_of_its_call"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (NotImplementedError("no kernel of it for this device"), True),
        (IndexError("a page that there is not"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (DeviceFault("counted when it was raised"), False),
    ],
)
def test_what_may_be_of_work_that_came_before_is_known_and_counted_once(error: Exception, is_of_its_call: bool) -> None:
    with async_device() as (device, _):
        assert device.is_of_its_call(error) is is_of_its_call
        device.note(error)
        assert device.num_faults == (not is_of_its_call and not isinstance(error, DeviceFault))
    assert CpuDevice().is_of_its_call(error), "an operation on the CPU is over when its call returns"


def test_an_error_that_a_device_tells_a_thread_is_counted_for_all_others() -> None:
    with async_device() as (device, runtime):
        event = device.record()
        runtime.late.fail(Kind.STAYS)
        runtime.default.give(bool)
        assert until(lambda: runtime.late.has_failed)
        told: list[Exception] = []

        def ask() -> None:
            for question in (lambda: device.is_done(event), device.enter_thread, device.record):
                with pytest.raises(DeviceFault) as caught:
                    question()
                told.append(caught.value)

        lane = threading.Thread(target=ask, name="pdcluster-lane-0")
        lane.start()
        lane.join()
        for error in told:
            device.note(error)
        assert device.num_faults == 3


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)])
def test_a_device_without_an_index_is_the_first(name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 refuses it: seen on an H200."""
    entered: list[object] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", entered.append)
    TorchRuntime().enter_device(torch.device(name))
    assert entered == [index]
