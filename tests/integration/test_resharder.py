"""The resharder in real process groups (gloo on loopback): right bytes, back-pressure, and nobody waits for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fakes.token_major import Pages, shape_of
from integration.processes import descendants
from integration.reshard_ranks import Scenario, assert_as_reference, run, running
from patience import EDGE_S, PATIENCE_S, until
from pdcluster_connector.device import CpuDevice, Device, DeviceEvent, Stream
from pdcluster_connector.reshard.feeds import ReshardItem
from pdcluster_connector.reshard.resharder import (
    Resharded,
    Resharder,
    ResharderContext,
    ReshardFailed,
    ReshardOutcome,
    StepRead,
)
from pdcluster_connector.reshard.rounds import GroupRank
from pdcluster_connector.reshard.staging import StagingMemory, Ticket
from pdcluster_connector.reshard.tensors import TokenRegion, region_bytes
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import RequestId

ONE_SHORT, THREE = ((1, 100),), ((1, 500), (2, 300), (1, 700))


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(2, (THREE, ONE_SHORT, (), ((1, 1100),))), id="2 to 1, and to its equal"),
        pytest.param(Scenario(4, (((1, 900), (2, 900)), ((2, 512),))), id="4 to 1 and to 2 in one step"),
        pytest.param(Scenario(2, (((4, 600), (8, 40)), ((1, 600), (4, 600)))), id="2 to 4, 8 and 1"),
        pytest.param(Scenario(4, (((1, 700),),), prefill=Pages(16), decode=Pages(64, 2)), id="other blocks"),
        pytest.param(Scenario(2, (((1, 700),),), prefill=Pages(64, 2, 6), decode=Pages(16, 1, 6)), id="padded pages"),
        pytest.param(Scenario(2, (((1, 700),),), prefill=Pages(64, 2, 1), decode=Pages(64, 2, 3)), id="odd strides"),
    ],
)
def test_decode_has_the_reference_bytes_after_several_layers_and_steps(scenario: Scenario, tmp_path: Path) -> None:
    results = run(scenario, tmp_path)
    assert len(results) == scenario.prefill_tp
    assert_as_reference(scenario, results)
    for result in results.values():
        assert result.failure == ""
        assert result.is_idle
        assert result.has_closed
        assert result.num_sockets[1] <= result.num_sockets[0]
        assert result.steps_of("read") == list(range(len(scenario.steps)))


def test_ranks_that_own_nothing_of_a_step_take_part_and_are_told_of_every_region(tmp_path: Path) -> None:
    scenario = Scenario(4, (ONE_SHORT, ONE_SHORT))
    results = run(scenario, tmp_path)
    assert_as_reference(scenario, results)
    for rank in (1, 2, 3):
        assert not results[rank].decodes
        assert results[rank].steps_of("staged") == [0] * 4 + [1] * 4


def test_a_staging_memory_smaller_than_a_layer_holds_the_resharder_but_no_order(tmp_path: Path) -> None:
    scenario = Scenario(2, (((1, 2000), (1, 900)), ((1, 1500),)), staging_bytes=96 << 10, write_s=0.003)
    results = run(scenario, tmp_path)
    assert_as_reference(scenario, results)
    for result in results.values():
        assert result.failure == ""
        assert result.is_idle
        assert result.ordered_s < result.seconds / 3, "an order waited for space"
        staged = [(step, region // 2) for name, step, region, _ in result.outcomes if name == "staged"]
        assert staged == sorted(staged)
        assert len(staged) > 2 * 4, "it took several rounds a layer"


def test_a_lane_that_gives_no_space_back_costs_its_own_rank_only(tmp_path: Path) -> None:
    scenario = Scenario(2, (((1, 1500), (1, 1500)), ((1, 900),)), staging_bytes=160 << 10, wait_s=10.0, hoards=1)
    results = run(scenario, tmp_path)
    assert results[0].steps_of("failed") == []
    assert results[1].steps_of("failed")
    assert set(results[1].steps_of("failed")) == {0}
    assert results[1].reasons() == {"prefill's staging memory of 163840 bytes was full for too long"}
    assert [result.failure for result in results.values()] == ["", ""]
    assert all(result.is_idle for result in results.values())
    assert_as_reference(scenario, results, without=("r0", "r1"))


def test_a_rank_that_dies_fails_the_others_at_once_with_a_reason(tmp_path: Path) -> None:
    scenario = Scenario(4, (((1, 600),), ((1, 600),), ((1, 600),)), dies=1)
    results = run(scenario, tmp_path)
    assert sorted(results) == [0, 2, 3]
    for rank, result in results.items():
        assert result.steps_of("failed") == [1] * 4 + [2] * 4
        assert result.steps_of("read") == [0, 1, 2]
        assert result.failure.startswith(f"prefill rank {rank} cannot exchange KV with the other ranks: ")
        assert result.reasons() == {result.failure}
        assert result.seconds < scenario.timeout_s / 2
        assert result.is_idle
        assert result.has_closed


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    scenario = Scenario(2, (((1, 600),), ((1, 900),)), pause_s={1: 0.7})
    results = run(scenario, tmp_path)
    assert_as_reference(scenario, results)
    assert results[0].seconds >= 0.7, "the fence was set before the other rank had sent"


def test_a_rank_that_is_later_than_the_timeout_fails_on_all_ranks(tmp_path: Path) -> None:
    scenario = Scenario(2, (((1, 600),), ((1, 600),)), pause_s={1: 12.0}, timeout_s=6.0)
    results = run(scenario, tmp_path)
    for result in results.values():
        assert result.steps_of("failed") == [1] * 4
        assert "cannot exchange KV" in result.failure
    assert results[0].seconds < 12.0


def test_a_device_that_never_ends_a_layer_breaks_the_group_before_the_others_time_out(tmp_path: Path) -> None:
    scenario = Scenario(2, (((1, 600),), ((1, 600),)), stuck=1, wait_s=0.5)
    results = run(scenario, tmp_path)
    assert "the forward pass did not end a layer within 0.5 s" in results[1].failure
    for result in results.values():
        assert result.steps_of("failed") == [1] * 4
        assert result.seconds < scenario.timeout_s / 2


def test_a_rank_that_is_closed_while_it_waits_ends_soon_and_so_do_the_others(tmp_path: Path) -> None:
    scenario = Scenario(2, (((1, 600),), ((1, 600),)), pause_s={1: 8.0}, timeout_s=60.0, closes=0)
    results = run(scenario, tmp_path)
    assert results[0].has_closed
    assert results[0].close_s < scenario.timeout_s / 2
    assert results[0].steps_of("failed")
    assert results[1].steps_of("failed") == [1] * 4
    assert results[1].seconds < scenario.timeout_s / 2


def test_a_request_that_one_rank_has_given_up_disturbs_no_other_request(tmp_path: Path) -> None:
    scenario = Scenario(2, (((1, 1100), (1, 900)), ((1, 700),)), drops=1)
    results = run(scenario, tmp_path)
    assert [result.failure for result in results.values()] == ["", ""]
    assert all(result.is_idle for result in results.values())
    assert_as_reference(scenario, results, without=("r0",))


def test_staging_for_ascend_begins_and_ends_on_2_mib(tmp_path: Path) -> None:
    results = run(Scenario(2, (ONE_SHORT,), staging_bytes=1 << 20, alignment_bytes=2 << 20), tmp_path)
    assert [result.staging_address % (2 << 20) for result in results.values()] == [0, 0]
    assert StagingMemory((2 << 20) + 1, torch.device("cpu"), 2 << 20).num_bytes == 4 << 20


def test_no_process_and_no_thread_outlives_its_group(tmp_path: Path) -> None:
    with running(Scenario(2, (((1, 600),), ((1, 600),)), pause_s={1: 60.0}), tmp_path) as ranks:
        pids = {process.pid for process, _ in ranks}
        assert all(process.is_alive() for process, _ in ranks)
    assert not any(process.is_alive() for process, _ in ranks)
    assert not pids & descendants(os.getpid())


def lone_resharder(
    on_outcome: Callable[[ReshardOutcome], object],
    *,
    staging_bytes: int = 1 << 20,
    staging: StagingMemory | None = None,
    device: Device | None = None,
) -> Resharder:
    """Prefill TP 1: every byte is our own."""
    shape = shape_of(Pages(128), 1, 8, 16)
    region = TokenRegion(torch.zeros(8 * shape.pages.block_stride, dtype=torch.uint8), shape, group=0)
    staging = staging or StagingMemory(staging_bytes, torch.device("cpu"))
    context = ResharderContext(GroupRank(0, 1), {0: region}, staging, device or CpuDevice())
    return Resharder(context, None, on_outcome)


def request(tokens: int = 256) -> ReshardItem:
    return ReshardItem(RequestId("r"), 2, 0, tokens, [1, 2], [1, 2], 128, 128)


def test_what_is_ordered_after_close_is_reported_failed_and_the_thread_ends() -> None:
    outcomes: list[ReshardOutcome] = []
    release = threading.Event()

    def hear(outcome: ReshardOutcome) -> None:
        outcomes.append(outcome)
        release.wait(PATIENCE_S)

    resharder = lone_resharder(hear)
    resharder.begin_step(1, {0: [request()]})
    resharder.layer_saved([0], None)
    resharder.layer_saved([0], None)
    resharder.end_step()
    while not outcomes:
        time.sleep(0.01)
    closing = threading.Thread(target=resharder.close, args=(5.0,))
    closing.start()
    assert until(lambda: resharder._is_closing)
    release.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert outcomes[1:] == [ReshardFailed(1, (0,), "prefill's resharder was closed"), StepRead(1)]
    assert "pdcluster-reshard" not in {thread.name for thread in threading.enumerate()}


def test_a_step_that_cannot_be_planned_fails_without_breaking_the_resharder() -> None:
    outcomes: list[ReshardOutcome] = []
    resharder = lone_resharder(outcomes.append, staging_bytes=1 << 13)
    resharder.begin_step(1, {0: [request()]})
    resharder.layer_saved([0], None)
    assert resharder.fence().wait(PATIENCE_S)
    assert resharder.close(5)
    (failed,) = outcomes
    assert isinstance(failed, ReshardFailed)
    assert failed.reason == (
        "this step cannot be resharded: one piece of 16384 bytes does not fit staging memory of 4096 bytes"
    )
    assert resharder.failure == ""


class FullAtFirst(StagingMemory):
    """Has space for all but the first that asks."""

    num_asked = 0

    def take(self, num_bytes: int, shares: int, *, deadline: float, is_closing: Callable[[], bool]) -> Ticket | None:
        self.num_asked += 1
        if self.num_asked == 1:
            return None
        return super().take(num_bytes, shares, deadline=deadline, is_closing=is_closing)


def test_after_a_round_without_space_no_later_round_of_the_layer_is_staged() -> None:
    """Its lanes give the layer up, and would never let go of a buffer that came behind their back."""
    outcomes: list[ReshardOutcome] = []
    staging = FullAtFirst(1 << 15, torch.device("cpu"))
    resharder = lone_resharder(outcomes.append, staging=staging)
    resharder.begin_step(1, {0: [request()]})
    resharder.layer_saved([0], None)
    assert resharder.fence().wait(EDGE_S)
    assert [type(outcome) for outcome in outcomes] == [ReshardFailed]
    assert (staging.num_asked, staging.is_idle) == (1, True)
    outcomes.clear()
    resharder.layer_saved([0], None)
    assert resharder.fence().wait(EDGE_S)
    assert [type(outcome) for outcome in outcomes] == [Resharded, Resharded], "the next layer is no worse for it"
    assert resharder.close(EDGE_S)


def test_a_region_is_found_in_its_cache_by_its_address() -> None:
    cache = torch.arange(64, dtype=torch.float32)
    part = region_bytes(cache, cache[16:].data_ptr(), 32)
    assert part.view(torch.float32).tolist() == list(range(16, 24))


def test_a_region_over_the_end_of_its_cache_is_refused_and_the_cache_stays_where_it_is() -> None:
    cache = torch.arange(64, dtype=torch.float32)
    address = cache.data_ptr()
    with pytest.raises(ConfigError, match="reaches over its storage"):
        region_bytes(cache, cache[16:].data_ptr(), 64 * 4)
    assert cache.data_ptr() == address


class RaisesAt(CpuDevice):
    """Raises at ``question``, and keeps the errors that it is asked to count."""

    def __init__(self, question: str) -> None:
        self.question = question
        self.noted: list[str] = []

    def open_stream(self, device: torch.device) -> Stream:
        self._answer("open_stream")
        return super().open_stream(device)

    def is_done(self, event: DeviceEvent) -> bool:
        self._answer("is_done")
        return super().is_done(event)

    def note(self, error: Exception) -> None:
        self.noted.append(str(error))

    def _answer(self, question: str) -> None:
        if question == self.question:
            raise RuntimeError(f"an illegal memory access was encountered in {question}")


@pytest.mark.parametrize("question", ["open_stream", "is_done"])
def test_an_error_of_the_device_is_noted_since_it_may_be_of_what_lanes_push(question: str) -> None:
    outcomes: list[ReshardOutcome] = []
    device = RaisesAt(question)
    resharder = lone_resharder(outcomes.append, device=device)
    resharder.begin_step(1, {0: [request()]})
    resharder.layer_saved([0], None)
    resharder.end_step()
    assert resharder.fence().wait(PATIENCE_S)
    assert resharder.close(5)
    assert device.noted == [f"an illegal memory access was encountered in {question}"]
    assert [type(outcome) for outcome in outcomes] == [ReshardFailed, StepRead]
