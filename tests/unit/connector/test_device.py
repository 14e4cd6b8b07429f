"""The choice of the device. What every device does: ``tests/contract/test_device.py``."""

from __future__ import annotations

import pytest
import torch

from fakes.async_device import async_device
from pdcluster_connector.device import CpuDevice, TorchRuntime, select_device
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


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)])
def test_a_device_without_an_index_is_the_first(name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 refuses it: seen on an H200."""
    entered: list[object] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", entered.append)
    TorchRuntime().enter_device(torch.device(name))
    assert entered == [index]
