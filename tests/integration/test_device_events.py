"""Bytes leave when the device has written them, not when the hook was called: the race of every early push."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fakes.device import ManualDevice, ManualStream
from fakes.token_major import Pages, shape_of
from integration.ranks import LIFE, Pair, make_pair
from pdcluster_connector.device import CpuDevice
from pdcluster_connector.reshard.feeds import ReshardItem
from pdcluster_connector.reshard.resharder import Outcome, Resharded, Resharder, ResharderParts, StepRead
from pdcluster_connector.reshard.rounds import GroupRank
from pdcluster_connector.reshard.staging import StagingMemory
from pdcluster_connector.reshard.tensors import TokenRegion
from pdcluster_connector.steps import PrefillStep
from pdcluster_protocol.ids import RequestId

_WHILE_NOTHING_MAY_HAPPEN_S = 0.3


@contextmanager
def pair_on_a_slow_device() -> Iterator[tuple[Pair, ManualDevice]]:
    """Both ranks; prefill's device is ready when the test says so."""
    with make_pair() as pair:
        device, worker = ManualDevice(), pair.prefill.worker
        worker._parts = dataclasses.replace(worker._parts, device=device)
        yield pair, device


def has_block(pair: Pair, layer: int, block: int) -> bool:
    return bool(pair.target.layers[layer, block].any())


def stays_false(pair: Pair, is_true: Callable[[], bool]) -> bool:
    return not pair.step_until(is_true, timeout_s=_WHILE_NOTHING_MAY_HAPPEN_S)


def test_a_layer_leaves_when_its_event_is_complete_and_none_before_it() -> None:
    with pair_on_a_slow_device() as (pair, device):
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        num_layers = len(pair.source.shape.layer_names())
        assert len(device.events) == num_layers, "one event a layer"
        device.events[1].complete()
        assert stays_false(pair, lambda: bool(pair.target.layers[:, 5].any())), (
            "the second layer does not pass the first"
        )
        device.events[0].complete()
        assert pair.step_until(lambda: has_block(pair, 0, 5) and has_block(pair, 1, 5))
        assert stays_false(pair, lambda: has_block(pair, num_layers - 1, 5) or "a" in pair.ended)
        for event in device.events:
            event.complete()
        assert pair.step_until(lambda: "a" in pair.ended)
        assert pair.ended["a"]
        assert (pair.target.layers[:, 5] == pair.source.layers[:, 1]).all()


def test_a_layer_that_saves_again_leaves_once() -> None:
    """As a draft layer does, once for each token that it guesses; the prompt's KV was there the first time."""
    with pair_on_a_slow_device() as (pair, device):
        pair.expect("a", 1)
        worker, names = pair.prefill.worker, pair.source.shape.layer_names()
        worker.begin_step(PrefillStep(LIFE, (pair.slice_of("a", [1], [5]),)))
        for name in (*names, names[-1], names[0]):
            worker.layer_saved(name)
        worker.end_step()
        assert len(device.events) == len(names)


def test_the_forward_thread_waits_for_no_event() -> None:
    with pair_on_a_slow_device() as (pair, _):
        pair.expect("a", 1)
        begun_at = time.monotonic()
        forward = threading.Thread(target=pair.forward, args=(pair.slice_of("a", [1], [5]),))
        forward.start()
        forward.join(5)
        assert not forward.is_alive(), f"still waiting after {time.monotonic() - begun_at:.1f} s"


def test_staging_is_handed_on_when_the_side_stream_is_through_with_it() -> None:
    """Its copies are the device's work too: a lane would read what is not there yet, and blocks would be let go."""
    outcomes: list[Outcome] = []
    stream, shape = ManualStream(), shape_of(Pages(128), 1, 8, 16)
    region = TokenRegion(torch.zeros(8 * shape.pages.block_stride, dtype=torch.uint8), shape, group=0)
    staging = StagingMemory(1 << 20, torch.device("cpu"))
    parts = ResharderParts(GroupRank(0, 1), {0: region}, staging, CpuDevice(), open_stream=lambda _: stream)
    resharder = Resharder(parts, None, outcomes.append)
    resharder.begin_step(1, {0: [ReshardItem(RequestId("r"), 2, 0, 256, [1, 2], [1, 2], 128, 128)]})
    resharder.layer_saved([0], None)
    resharder.end_step()
    fence = resharder.fence()
    assert not fence.wait(_WHILE_NOTHING_MAY_HAPPEN_S)
    assert outcomes == []
    while not fence.wait(0.01):
        for mark in stream.marks:
            mark.complete()
    assert {type(outcome) for outcome in outcomes[:-1]} == {Resharded}
    assert outcomes[-1] == StepRead(1)
    assert resharder.close(5)
