"""What the connector relies on in a device: the engine's CPU, the one of our tests, and an accelerator where one is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final

import pytest
import torch

from contract.devices import Bench, accelerator_bench, async_bench, cpu_bench
from patience import PATIENCE_S, until
from pdcluster_connector.device import DeviceEvent
from pdcluster_connector.self_test.events import Products, try_events
from pdcluster_connector.self_test.judging import EventVerdict

ACCELERATORS: Final = (accelerator_bench,) if torch.accelerator.is_available() else ()
BESIDE: Final = (async_bench, *ACCELERATORS)
"""Those whose work runs beside the host."""


@pytest.fixture(params=[cpu_bench, *BESIDE], ids=lambda bench: bench.__name__)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with request.param() as made:
        yield made


@pytest.fixture(params=BESIDE, ids=lambda bench: bench.__name__)
def beside(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with request.param() as made:
        yield made


def is_done_elsewhere(bench: Bench, event: DeviceEvent) -> bool:
    """As a lane asks: in a thread that has never given the device work."""
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(bench.device.is_done(event)))
    asking.start()
    asking.join(PATIENCE_S)
    return answers[0]


def test_an_event_of_an_idle_device_is_soon_complete(bench: Bench) -> None:
    event = bench.device.record()
    assert until(lambda: bench.device.is_done(event))
    assert is_done_elsewhere(bench, event)


def test_nothing_is_an_event_that_is_complete(bench: Bench) -> None:
    assert bench.device.is_done(None)


def test_what_was_given_before_an_event_is_in_memory_when_it_is_complete(bench: Bench) -> None:
    memory = bench.new()
    memory.fill_(7)
    memory[2:4].copy_(memory[:2] + 1)
    event = bench.device.record()
    assert until(lambda: is_done_elsewhere(bench, event))
    assert bench.read(memory) == [7, 7, 8, 8, 7, 7, 7, 7]


def test_an_event_is_complete_for_no_thread_while_work_before_it_is_under_way(beside: Bench) -> None:
    end = beside.begin_slow_work()
    event = beside.device.record()
    assert not beside.device.is_done(event)
    assert not is_done_elsewhere(beside, event)
    end()
    assert until(lambda: is_done_elsewhere(beside, event))


def test_an_event_does_not_wait_for_work_that_was_given_after_it(beside: Bench) -> None:
    before = beside.device.record()
    assert until(lambda: beside.device.is_done(before))
    end = beside.begin_slow_work()
    after = beside.device.record()
    assert beside.device.is_done(before)
    assert not beside.device.is_done(after)
    end()


def test_a_side_stream_does_not_wait_for_the_forward_pass_nor_hides_behind_it(beside: Bench) -> None:
    memory, stream = beside.new(), beside.device.open_stream(beside.where)
    end = beside.begin_slow_work()
    event = beside.device.record()
    with stream:
        memory.fill_(5)
    mark = stream.record_event()
    assert until(lambda: beside.device.is_done(mark))
    assert not beside.device.is_done(event)
    end()
    assert beside.read(memory) == [5] * 8


def test_the_forward_pass_does_not_wait_for_a_side_stream_and_leaving_one_is_leaving_it(beside: Bench) -> None:
    stream = beside.device.open_stream(beside.where)
    with stream:
        end = beside.begin_slow_work()
    mark, event = stream.record_event(), beside.device.record()
    assert until(lambda: beside.device.is_done(event))
    assert not is_done_elsewhere(beside, mark)
    end()
    assert until(lambda: beside.device.is_done(mark))


def test_a_side_stream_is_that_of_the_thread_that_is_in_it(beside: Bench) -> None:
    stream, events = beside.device.open_stream(beside.where), list[DeviceEvent]()
    with stream:
        end = beside.begin_slow_work()
        other = threading.Thread(target=lambda: events.append(beside.device.record()))
        other.start()
        other.join(PATIENCE_S)
        inside = beside.device.record()
        assert until(lambda: beside.device.is_done(events[0]))
        assert not beside.device.is_done(inside)
        end()


def test_two_side_streams_do_not_wait_for_each_other(beside: Bench) -> None:
    first, second = (beside.device.open_stream(beside.where) for _ in range(2))
    with first:
        end = beside.begin_slow_work()
    marks = first.record_event(), second.record_event()
    assert until(lambda: beside.device.is_done(marks[1]))
    assert not beside.device.is_done(marks[0])
    end()


def test_what_is_made_and_moved_in_a_side_stream_is_there_when_its_mark_is_complete(bench: Bench) -> None:
    """The operations of a round of the resharder: pieces into new and into given memory, and parts of them on."""
    cache, stream = bench.new(), bench.device.open_stream(bench.where)
    cache.copy_(torch.arange(8, dtype=torch.uint8))
    saved = bench.device.record()
    assert until(lambda: bench.device.is_done(saved))
    with stream:
        rows, pieces = torch.tensor([3, 1]).to(bench.where), cache.view(torch.int16).view(4, 1)
        gathered = torch.index_select(pieces, 0, rows)
        room = torch.empty(8, dtype=torch.uint8, device=bench.where)
        torch.index_select(pieces, 0, rows, out=room[:4].view(torch.int16).view(2, 1))
        room[4:].view(2, 2).copy_(gathered.view(torch.uint8)[:, :2])
    mark = stream.record_event()
    assert until(lambda: bench.device.is_done(mark))
    assert bench.read(room) == [6, 7, 2, 3, 6, 7, 2, 3]


def test_a_value_that_the_host_asks_for_is_the_one_behind_what_was_given(bench: Bench) -> None:
    memory = bench.new()
    memory.fill_(3)
    assert int(memory.sum().item()) == 24


def test_it_passes_the_self_test_of_its_events(beside: Bench) -> None:
    work = Products(beside.device, beside.where, 8 if beside.where.type == "cpu" else 2048)
    verdict = try_events(beside.device, beside.where, work)
    assert verdict is EventVerdict.HONEST or beside.where.type == "cpu", "the host's own threads may be through at once"
