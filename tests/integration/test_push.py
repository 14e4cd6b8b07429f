"""A prefill rank pushes into a decode rank: real side channel and Mooncake, no engine around them."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fakes.transports import Failing, wrap_transports
from integration.ports import fresh_port
from integration.processes import is_port_free
from integration.ranks import LIFE, Cache, Pair, Shape, engine_facts, fingerprint_of, make_pair
from patience import EDGE_S, until
from pdcluster_connector.assembly import DecodeRank, make_decode_rank, make_prefill_rank
from pdcluster_connector.core.writers import PeerId
from pdcluster_connector.device import CpuDevice
from pdcluster_connector.ending import end_parts
from pdcluster_connector.engine_facts import Memory
from pdcluster_connector.failures import PUSHED_BYTES, PUSHES_DONE, RECEIVES_DONE, take_counts
from pdcluster_connector.settings import PushTiming, Settings
from pdcluster_connector.side_channel import Received
from pdcluster_connector.steps import PrefillStep
from pdcluster_connector.transport.sessions import Opening
from pdcluster_protocol.errors import ConfigError, ProtocolError
from pdcluster_protocol.ids import BootId, RequestId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import SideChannelAddress

PATIENT = Settings(quarantine_s=60, hold_s=60, lease_s=60, handshake_timeout_s=60, preempt_wait_s=10)
"""What ends soon in spite of these was told, and not waited for."""


def to_fp8(memory: Memory) -> Memory:
    """Of an engine that keeps KV otherwise."""
    return dataclasses.replace(memory, fingerprint=fingerprint_of(Shape(), kv_dtype="fp8"))


def require_equal_blocks(pair: Pair, ours: list[int], theirs: list[int]) -> None:
    assert np.array_equal(pair.source.layers[:, ours], pair.target.layers[:, theirs])


def test_blocks_arrive_whole_and_nothing_else_changes() -> None:
    ours, theirs = [3, 4, 5, 9], [7, 8, 2, 30]
    with make_pair() as pair:
        pair.expect("a", 4)
        pair.forward(pair.slice_of("a", ours, theirs))
        pair.require_received("a")
        require_equal_blocks(pair, ours, theirs)
        untouched = [block for block in range(64) if block not in theirs]
        assert not pair.target.layers[:, untouched].any()


def test_bytes_pushes_and_receives_are_counted() -> None:
    take_counts()  # Of earlier tests.
    counted: Counter[str] = Counter()
    with make_pair() as pair:
        wanted = {PUSHED_BYTES: pair.target.layers[:, [5, 6]].nbytes, PUSHES_DONE: 1, RECEIVES_DONE: 1}
        pair.expect("a", 2)
        pair.forward(pair.slice_of("a", [1, 2], [5, 6]))

        def is_counted() -> bool:
            counted.update(take_counts())
            return counted.keys() == wanted.keys()

        assert pair.step_until(is_counted)
    assert counted == wanted


def test_requests_of_one_step_are_fused_and_each_is_received() -> None:
    with make_pair() as pair:
        slices = [pair.slice_of(f"r{i}", [i, 20 + i], [40 - i, 41 + i]) for i in range(1, 9)]
        for part in slices:
            pair.expect(part.request_id, 2)
        pair.forward(*slices)
        assert pair.step_until(lambda: len(pair.ended) == 8)
        assert all(pair.ended.values())
        for part in slices:
            require_equal_blocks(pair, list(part.groups[0].source_blocks), list(part.groups[0].target_blocks))


def test_chunks_arrive_in_several_steps() -> None:
    with make_pair() as pair:
        pair.expect("a", 3)
        pair.forward(pair.slice_of("a", [1], [5], is_last=False))
        pair.forward(pair.slice_of("a", [], [], is_last=False))
        pair.step()
        assert pair.ended == {}
        pair.forward(pair.slice_of("a", [2, 3], [6, 7]))
        assert pair.step_until(lambda: "a" in pair.ended)
        require_equal_blocks(pair, [1, 2, 3], [5, 6, 7])


def test_a_push_that_opens_before_decode_expects_it_waits_for_the_reservation() -> None:
    with make_pair() as pair:
        pair.forward(pair.slice_of("a", [1], [5]))
        assert not pair.step_until(lambda: bool(pair.target.layers.any()), timeout_s=0.3)
        pair.expect("a", 1)
        assert pair.step_until(lambda: "a" in pair.ended)
        require_equal_blocks(pair, [1], [5])


def test_a_flood_of_frames_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_pair() as pair, monkeypatch.context() as flooded:
        frame = Received(PeerId(b"noise"), ProtocolError("noise"), 60)
        flooded.setattr(pair.decode.worker._channel, "receive", lambda: frame)
        pair.expect("a", 1)
        pair.cancel("a")
        assert pair.step_until(lambda: "a" in pair.ended)


def test_blocks_are_released_once_they_were_read_and_the_request_has_ended() -> None:
    with make_pair() as pair:
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        assert pair.step_until(lambda: "a" in pair.ended)
        assert pair.released == set()
        pair.step(finished=["a"])
        assert pair.step_until(lambda: pair.released == {"a"})


def test_a_layer_without_a_hook_is_swept_at_the_end_of_the_step() -> None:
    with make_pair() as pair:
        pair.expect("a", 1)
        worker = pair.prefill.worker
        worker.begin_step(_step(pair, "a"))
        worker.layer_saved("layers.1")
        worker.end_step()
        assert pair.step_until(lambda: "a" in pair.ended)
        require_equal_blocks(pair, [1], [5])


def test_a_layer_that_gives_no_name_costs_nothing() -> None:
    """vllm-ascend 0.23 calls the hook of each gated delta net with an empty one."""
    with make_pair() as pair:
        pair.expect("a", 1)
        worker = pair.prefill.worker
        worker.begin_step(_step(pair, "a"))
        for name in pair.source.shape.layer_names():
            worker.layer_saved("")
            worker.layer_saved(name)
        worker.end_step()
        assert pair.step_until(lambda: "a" in pair.ended)
        require_equal_blocks(pair, [1], [5])


def test_serial_timing_sends_nothing_before_the_forward_pass_ends() -> None:
    settings = Settings(push=PushTiming.SERIAL)
    with make_pair(settings=settings) as pair:
        pair.expect("a", 1)
        worker = pair.prefill.worker
        worker.begin_step(_step(pair, "a"))
        for name in pair.source.shape.layer_names():
            worker.layer_saved(name)
        assert not pair.step_until(lambda: bool(pair.target.layers.any()), timeout_s=0.3)
        worker.end_step()
        assert pair.step_until(lambda: "a" in pair.ended)


def test_too_few_blocks_are_a_failure_on_decode_and_not_a_hang() -> None:
    with make_pair() as pair:
        pair.expect("a", 2)
        pair.forward(pair.slice_of("a", [1], [5]))
        pair.require_lost("a")


def test_a_cancelled_request_is_fenced_before_it_is_reported() -> None:
    with make_pair(settings=PATIENT) as pair:
        pair.expect("a", 2)
        pair.forward(pair.slice_of("a", [1], [5], is_last=False))
        assert pair.step_until(lambda: bool(pair.target.layers[:, 5].any()))
        pair.cancel("a")
        pair.require_lost("a")
        before = pair.target.layers.copy()
        # vLLM goes on computing the prompt until it hears of the abort.
        for block in (2, 3, 4):
            pair.forward(pair.slice_of("a", [block], [block + 4], is_last=block == 4))
            assert not pair.step_until(lambda: False, timeout_s=0.05)
        pair.step(finished=["a"])
        assert pair.step_until(lambda: pair.released == {"a"})
        assert np.array_equal(before, pair.target.layers)


def test_an_abort_on_prefill_fails_the_request_on_decode_and_releases_the_blocks() -> None:
    with make_pair() as pair:
        pair.expect("a", 2)
        pair.forward(pair.slice_of("a", [1], [5], is_last=False))
        pair.step(finished=["a"])
        assert pair.step_until(lambda: pair.released == {"a"} and "a" in pair.ended)
        assert not pair.ended["a"]


def test_engines_that_differ_are_refused_before_any_byte_and_decode_hears_it() -> None:
    with make_pair(settings=PATIENT, changes={Role.DECODE: to_fp8}) as pair:
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        pair.step(finished=["a"])
        assert pair.step_until(lambda: pair.released == {"a"} and pair.ended == {"a": False})
        assert not pair.target.layers.any()


def test_a_decode_rank_that_does_not_answer_costs_the_handshake_timeout_and_no_more() -> None:
    with make_pair(settings=msgspec.structs.replace(PATIENT, handshake_timeout_s=0.5)) as pair:
        part = pair.slice_of("a", [1], [5])
        end_parts([pair.decode])
        pair.forward(part)
        pair.step(finished=["a"])
        assert pair.step_until(lambda: pair.released == {"a"})


def test_the_deadline_ends_a_push_that_gets_no_grant_and_a_wait_that_gets_no_push() -> None:
    with make_pair(settings=PATIENT) as pair:
        pair.forward(pair.slice_of("nobody expects it", [1], [5], deadline_ms=300))
        pair.expect("nobody sends it", 1, deadline_ms=300)
        pair.step(finished=["nobody expects it"])
        assert pair.step_until(lambda: bool(pair.released) and bool(pair.ended))
        assert pair.ended == {"nobody sends it": False}


def test_preempted_blocks_are_not_read_after_the_wait() -> None:
    """The blocks are overwritten at once; what arrives is what they held before."""
    with make_pair(Shape(num_layers=8, num_blocks=512), settings=Settings(preempt_wait_s=60.0)) as pair:
        ours, theirs = list(range(1, 200)), list(range(201, 400))
        before = pair.source.layers.copy()
        pair.expect("a", len(ours) + 1)
        pair.forward(pair.slice_of("a", ours, theirs, is_last=False))
        pair.prefill.worker.protect_preempted([RequestId("a")])
        pair.source.layers[:, ours] = 0
        pair.source.layers[:, 250] = 7
        pair.forward(pair.slice_of("a", [250], [450]))
        pair.require_received("a")
        assert np.array_equal(before[:, ours], pair.target.layers[:, theirs])


def test_a_preempted_request_that_cannot_be_read_in_time_fails_and_is_never_torn() -> None:
    settings = Settings(preempt_wait_s=0.05)
    with make_pair(settings=settings) as pair:
        # Without a grant nothing can leave, so nothing can be read in time.
        pair.forward(pair.slice_of("a", [1], [5]))
        pair.prefill.worker.protect_preempted([RequestId("a")])
        pair.source.layers[:] = 0
        pair.expect("a", 1)
        pair.step(finished=["a"])
        assert pair.step_until(lambda: pair.released == {"a"})
        assert not pair.ended.get("a", False)
        assert not pair.target.layers.any()


def test_lanes_to_earlier_lives_of_decode_end_and_leave_no_thread_behind() -> None:
    def lanes() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("pdcluster-lane")]

    with make_pair() as pair:
        port = fresh_port()
        for life in range(3):
            with make_pair(settings=Settings(side_channel_port=port)) as other:
                late = dataclasses.replace(pair, decode=other.decode, ended={})
                other.expect(f"life {life}", 1)
                pair.prefill.worker.begin_step(_step_to(pair, other.decode, f"life {life}"))
                pair.prefill.worker.end_step()
                assert late.step_until(lambda late=late: bool(late.ended))  # type: ignore[misc]  # bound
            assert until(lambda: is_port_free(port)), "ZeroMQ gives it back a moment later"
        assert pair.step_until(lambda: len(lanes()) == 1)


def test_a_trace_that_cannot_be_written_costs_no_request(tmp_path: Path) -> None:
    with make_pair(settings=Settings(trace_file=str(tmp_path / "no such folder" / "trace"))) as pair:
        for name in ("a", "b"):
            pair.expect(name, 1)
            pair.forward(pair.slice_of(name, [1], [5]))
            assert pair.step_until(lambda name=name: name in pair.ended)  # type: ignore[misc]  # bound
        pair.step(finished=["a", "b"])
        assert pair.step_until(lambda: pair.released == {"a", "b"})


def test_an_address_that_no_socket_takes_fails_the_push_and_releases_the_blocks() -> None:
    with make_pair() as pair:
        part = pair.slice_of("a", [1], [5])
        nowhere = SideChannelAddress("no host at all", 1, BootId("b"))
        target = msgspec.structs.replace(part.target, side_channels=(nowhere,))
        pair.forward(msgspec.structs.replace(part, target=target))
        pair.step(finished=["a"])
        assert pair.step_until(lambda: pair.released == {"a"})


def test_a_preemption_does_not_wait_for_a_lane_that_has_failed() -> None:
    with make_pair(settings=PATIENT, changes={Role.DECODE: to_fp8}) as pair:
        pair.expect("a", 2)
        pair.forward(pair.slice_of("a", [1], [5], is_last=False))
        assert pair.step_until(lambda: pair.ended == {"a": False})
        begin = time.monotonic()
        pair.prefill.worker.protect_preempted([RequestId("a")])
        assert time.monotonic() - begin < PATIENT.preempt_wait_s / 2


def test_closing_ends_every_thread() -> None:
    with make_pair() as pair:
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        assert pair.step_until(lambda: "a" in pair.ended)
        assert [t for t in threading.enumerate() if t.name.startswith("pdcluster")]
    assert [t.name for t in threading.enumerate() if t.name.startswith("pdcluster")] == []


def test_a_decode_engine_that_restarts_on_the_same_port_gets_nothing_of_the_old_requests() -> None:
    port = fresh_port()
    settings = Settings(handshake_timeout_s=1.0, quarantine_s=1.0, side_channel_port=port)
    with make_pair(settings=settings) as pair:
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        assert pair.step_until(lambda: "a" in pair.ended)
        old = pair.decode
        end_parts([old])
        assert until(lambda: is_port_free(port)), "ZeroMQ gives it back a moment later"
        with make_pair(settings=Settings(side_channel_port=port)) as other:
            late = dataclasses.replace(pair, decode=other.decode)
            other.expect("b", 1)
            # The reservation names the old life.
            late.prefill.worker.begin_step(_step_to(pair, old, "b"))
            late.prefill.worker.end_step()
            late.step(finished=["b"])
            assert late.step_until(lambda: late.released == {"b"})
            assert not other.target.layers.any()


def _step(pair: Pair, name: str) -> PrefillStep:
    return PrefillStep(LIFE, (pair.slice_of(name, [1], [5]),))


def _step_to(pair: Pair, decode: DecodeRank, name: str) -> PrefillStep:
    return _step(dataclasses.replace(pair, decode=decode), name)


def test_a_lane_that_ends_releases_nothing_of_the_lane_that_took_its_place() -> None:
    with make_pair() as pair:
        worker, opened = pair.prefill.worker, itertools.count()
        wrap_transports(worker, lambda inner: inner if next(opened) else Failing(inner))
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        pair.step(finished=["a"])
        assert pair.step_until(lambda: pair.released == {"a"})
        (lane,) = worker._known_lanes()
        pair.forward(pair.slice_of("b", [2], [6]))  # decode does not expect it yet: no grant, so nothing is read
        pair.step(finished=["b"])
        assert pair.step_until(lambda: lane.is_over)
        assert not pair.step_until(lambda: "b" in pair.released, timeout_s=0.5)
        pair.expect("b", 1)
        assert pair.step_until(lambda: pair.ended.get("b", False) and "b" in pair.released)
        require_equal_blocks(pair, [2], [6])


class _Picky(CpuDevice):
    """Wants memory from an address on that none of ours has."""

    registration_alignment_bytes = 1 << 46


@pytest.mark.parametrize("side", Role)
def test_memory_is_registered_as_the_ranks_own_device_wants_it(side: Role) -> None:
    make = make_prefill_rank if side is Role.PREFILL else make_decode_rank
    memory = Cache(Shape()).memory(fingerprint_of(Shape()))
    with pytest.raises(ConfigError, match=f"a multiple of {1 << 46} bytes"):
        make(engine_facts(side, Shape(), Settings()), memory, device=_Picky())


class _Noting(CpuDevice):
    """Notes which threads have entered it."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def enter_thread(self) -> None:
        self.threads.append(threading.current_thread().name.rstrip("0123456789-"))


def test_each_thread_that_needs_the_device_enters_it_first() -> None:
    """Those that open sessions too: with Ascend a transport is of the device of the thread that makes it."""
    device = _Noting()
    with make_pair(devices={Role.PREFILL: device}) as pair:
        assert len(device.threads) == 1, "the first session, opened in this thread"
        pair.expect("a", 1)
        pair.forward(pair.slice_of("a", [1], [5]))
        assert pair.step_until(lambda: pair.ended.get("a", False))
        assert "pdcluster-lane" in device.threads
        assert "pdcluster-open" in device.threads, "submits a peer's first writes"
        opening = Opening(pair.prefill.sessions, lambda: None)
        opening.close(EDGE_S)
        assert device.threads[-1] == "pdcluster-session"
