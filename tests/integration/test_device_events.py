"""Bytes leave when the device has written them, not when the hook was called: the race of every early push.

The forward pass runs beside the host and goes on when a test lets it. Decode never sees what was there before.
"""

from __future__ import annotations

import threading
from functools import partial

import msgspec
import pytest

from integration.slow_prefill import SETTINGS, SlowPrefill, slow_prefill
from patience import PATIENCE_S
from pdcluster_connector.steps import PrefillStep
from pdcluster_protocol.ids import RequestId

OTHER = 0x11
"""What another request's kernels write into blocks that were taken away."""


def test_a_layer_leaves_when_it_is_computed_and_none_before_it() -> None:
    with slow_prefill() as slow:
        slow.pair.expect("a", 1)
        slow.compute(slow.pair.slice_of("a", [1], [5]), [1])
        assert len(slow.forward.events) == len(slow.names), "one event a layer"
        slow.pair.step(finished=["a"])
        for layer in range(len(slow.names)):
            assert slow.lane_waits(layer, layer, 5)
            assert not slow.pair.released, "its blocks are not read yet"
            slow.forward.let(1)
            assert slow.pair.step_until(partial(slow.arrived, layer, 5))
        assert slow.pair.step_until(lambda: "a" in slow.pair.ended and "a" in slow.pair.released)
        assert slow.pair.ended["a"]


def test_a_layer_without_a_hook_leaves_when_all_that_was_given_in_the_step_is_done() -> None:
    """Recurrent state, for one: the end of the step sweeps it, and the device is still at the first layer then."""
    with slow_prefill() as slow:
        first, *swept = range(len(slow.names))
        slow.pair.expect("a", 1)
        slow.compute(slow.pair.slice_of("a", [1], [5]), [1], hooked=slow.names[:1])
        slow.forward.let(1)
        assert slow.pair.step_until(lambda: slow.arrived(first, 5))
        for _ in swept:
            assert slow.lane_waits(1, first + 1, 5)
            slow.forward.let(1)
        assert slow.pair.step_until(lambda: "a" in slow.pair.ended)
        assert slow.pair.ended["a"]
        assert all(slow.arrived(layer, 5) for layer in swept)


def test_a_layer_that_saves_again_leaves_once() -> None:
    """As a draft layer does, once for each token that it guesses; the prompt's KV was there the first time."""
    with slow_prefill() as slow:
        slow.pair.expect("a", 1)
        worker, names = slow.pair.prefill.worker, slow.names
        worker.begin_step(PrefillStep(slow.pair.life, (slow.pair.slice_of("a", [1], [5]),)))
        for name in (*names, names[-1], names[0]):
            worker.layer_saved(name)
        worker.end_step()
        assert len(slow.forward.events) == len(names)


def test_the_forward_thread_waits_for_no_kernel() -> None:
    with slow_prefill() as slow:
        slow.pair.expect("a", 1)
        forward = threading.Thread(target=slow.compute, args=(slow.pair.slice_of("a", [1], [5]), [1]))
        forward.start()
        forward.join(PATIENCE_S)
        assert not forward.is_alive()
        assert slow.forward.num_done == 0


def preempt(slow: SlowPrefill) -> threading.Thread:
    """The forward thread takes the blocks of ``a`` away, and gives the kernels that overwrite them when it may."""

    def take_away() -> None:
        slow.pair.prefill.worker.protect_preempted([RequestId("a")])
        for layer in range(len(slow.names)):
            slow.kernel(layer, [1], OTHER)

    forward = threading.Thread(target=take_away)
    forward.start()
    return forward


def test_blocks_that_are_taken_away_are_not_overwritten_before_they_were_computed_and_read() -> None:
    with slow_prefill(msgspec.structs.replace(SETTINGS, preempt_wait_s=PATIENCE_S)) as slow:
        slow.pair.expect("a", 1)
        slow.compute(slow.pair.slice_of("a", [1], [5]), [1])
        forward = preempt(slow)
        for layer in range(len(slow.names)):
            assert slow.forward.is_awaited(layer, lambda: not forward.is_alive())
            slow.forward.let(1)
        forward.join(PATIENCE_S)
        assert not forward.is_alive()
        slow.forward.release()
        assert slow.pair.step_until(lambda: "a" in slow.pair.ended)
        assert slow.pair.ended["a"]
        assert all(slow.arrived(layer, 5) for layer in range(len(slow.names)))


def test_blocks_that_are_overwritten_before_the_device_came_to_them_are_no_answer() -> None:
    """The forward thread cannot wait for ever for a device that is far behind: the push is given up."""
    with slow_prefill(msgspec.structs.replace(SETTINGS, preempt_wait_s=0.05)) as slow:
        slow.pair.expect("a", 1)
        slow.compute(slow.pair.slice_of("a", [1], [5]), [1])
        forward = preempt(slow)
        forward.join(PATIENCE_S)
        slow.forward.release()
        slow.forward.synchronize()
        assert slow.pair.step_until(lambda: "a" in slow.pair.ended)
        assert not slow.pair.ended["a"]


def test_a_device_that_fails_fails_the_push_with_its_error_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its events answer with the error, for ever."""

    def fault() -> None:
        raise RuntimeError("illegal memory access")

    with slow_prefill() as slow:
        slow.pair.expect("a", 1)
        slow.forward.give(fault)
        slow.compute(slow.pair.slice_of("a", [1], [5]), [1])
        slow.forward.release()
        assert slow.pair.step_until(lambda: "a" in slow.pair.ended)
        assert not slow.pair.ended["a"]
        (lost,) = slow.pair.losses
        assert lost.reason.startswith("prefill gave up: prefill's lane to decode rank 0 failed: ")
        assert "illegal memory access" in lost.reason
        slow.pair.expect("b", 1)
        slow.compute(slow.pair.slice_of("b", [2], [6]), [2])
        assert slow.pair.step_until(lambda: "b" in slow.pair.ended)
    assert [record.exc_info is not None for record in caplog.records if "lane failed" in record.message] == [True] * 2
