"""The trial of events, on devices that are honest, early, late for ever, slow, hung or broken."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest
import torch

from fakes.async_device import AsyncRuntime, async_device
from integration.ranks import Cache, Shape, engine_facts, fingerprint_of
from pdcluster_connector.assembly import make_decode_rank, make_prefill_rank
from pdcluster_connector.device import AcceleratorDevice, DeviceEvent, Stream
from pdcluster_connector.self_test.events import try_events
from pdcluster_connector.self_test.judging import EventVerdict, Patience
from pdcluster_connector.settings import Settings
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role

CPU = torch.device("cpu")
SHORT = Patience(late_s=0.2, work_s=0.5)
"""For devices that never do what they should."""
MANY = 50
"""Questions, which a slow device takes to end its work."""


class SaysAlways:
    """An event that has one answer."""

    def __init__(self, is_complete: bool) -> None:
        self.is_complete = is_complete

    def query(self) -> bool:
        return self.is_complete


class Dishonest(AcceleratorDevice):
    """Its events say always the same, whatever is under way."""

    says = True

    def record(self) -> DeviceEvent:
        super().record()
        return SaysAlways(self.says)


class Fails(AcceleratorDevice):
    """As an NPU whose query needs a context that the thread does not have."""

    def is_done(self, event: DeviceEvent) -> bool:
        raise RuntimeError("context is null")


class HasNoContext(AcceleratorDevice):
    """As an NPU that a thread cannot enter."""

    def enter_thread(self) -> None:
        raise RuntimeError("context is null")


class HeldWork:
    """Work that is under way until it was looked at ``ends_after`` times."""

    def __init__(self, runtime: AsyncRuntime, ends_after: int) -> None:
        self.runtime, self.ends_after = runtime, ends_after
        self.looks, self.given = 0, list[float]()
        self._mark = runtime.tensor(torch.zeros(1, dtype=torch.int32))

    def give(self, mark: int, length_s: float) -> None:
        stream = self.runtime.current_stream()
        stream.release()  # of a former work that was given up
        stream.synchronize()
        if self.ends_after:
            stream.hold()
        self.given.append(length_s)
        self._mark.fill_(mark)
        if not self.ends_after:
            stream.synchronize()

    def is_written(self, mark: int, reader: Stream) -> bool:
        self.looks += 1
        if self.looks == self.ends_after:
            self.runtime.default.release()
        with reader:
            return int(self._mark.item()) == mark


@pytest.fixture
def runtime() -> Iterator[AsyncRuntime]:
    with async_device() as (_, made):
        yield made


def test_an_honest_device_passes_by_the_first_work(runtime: AsyncRuntime) -> None:
    work = HeldWork(runtime, ends_after=2)
    assert try_events(AcceleratorDevice(runtime, 1), CPU, work) is EventVerdict.HONEST
    assert work.given == [0.03]


def test_a_slow_device_passes_however_often_it_is_asked(runtime: AsyncRuntime) -> None:
    work = HeldWork(runtime, ends_after=MANY)
    assert try_events(AcceleratorDevice(runtime, 1), CPU, work) is EventVerdict.HONEST
    assert work.looks >= MANY


def test_a_device_that_is_through_before_each_question_gets_longer_work_and_is_not_refused(
    runtime: AsyncRuntime,
) -> None:
    work = HeldWork(runtime, ends_after=0)
    assert try_events(AcceleratorDevice(runtime, 1), CPU, work) is EventVerdict.UNSEEN
    assert work.given == [0.03, 0.1, 0.3]
    assert sum(work.given) < 1


def test_events_that_are_complete_too_early_are_found(runtime: AsyncRuntime) -> None:
    with pytest.raises(ConfigError, match="device cpu: an event is complete while its work is under way"):
        try_events(Dishonest(runtime, 1), CPU, HeldWork(runtime, ends_after=MANY))


def test_events_that_are_complete_too_early_are_no_fault_that_a_fast_device_can_have(runtime: AsyncRuntime) -> None:
    """Nothing tells them from honest ones while no question comes in time; so nothing is said."""
    assert try_events(Dishonest(runtime, 1), CPU, HeldWork(runtime, ends_after=0)) is EventVerdict.UNSEEN


def test_events_that_are_never_complete_are_found(runtime: AsyncRuntime) -> None:
    device = Dishonest(runtime, 1)
    device.says = False
    with pytest.raises(ConfigError, match=r"an event is not complete 0.2 s after its work"):
        try_events(device, CPU, HeldWork(runtime, ends_after=2), SHORT)


def test_work_that_never_ends_is_found(runtime: AsyncRuntime) -> None:
    with pytest.raises(ConfigError, match=r"work of 0.3 s did not end in 0.5 s"):
        try_events(AcceleratorDevice(runtime, 1), CPU, HeldWork(runtime, ends_after=1 << 40), SHORT)
    runtime.release()


def test_a_device_that_cannot_be_asked_in_a_lanes_thread_is_named_with_its_own_words(runtime: AsyncRuntime) -> None:
    with pytest.raises(ConfigError, match=r"cannot be asked for an event in a thread of its own \(context is null\)"):
        try_events(Fails(runtime, 1), CPU, HeldWork(runtime, ends_after=2))


def test_no_thread_is_left_over(runtime: AsyncRuntime) -> None:
    try_events(AcceleratorDevice(runtime, 1), CPU, HeldWork(runtime, ends_after=2))
    assert "pdcluster-self-test" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("device_type", "said"),
    [("xpu", "device cpu cannot be asked for an event"), ("cuda", "is for device type cpu, this engine's is cuda")],
)
def test_no_rank_is_made_on_a_machine_that_fails(runtime: AsyncRuntime, device_type: str, said: str) -> None:
    """Of two devices that are no CPU: one whose events cannot be asked, one for which Mooncake is not built."""
    shape = Shape()
    memory = Cache(shape).memory(fingerprint_of(shape))
    for role, make in ((Role.PREFILL, make_prefill_rank), (Role.DECODE, make_decode_rank)):
        facts = dataclasses.replace(engine_facts(role, shape, Settings()), device_type=device_type)
        with pytest.raises(ConfigError, match=said):
            make(facts, memory, device=HasNoContext(runtime, 1))
