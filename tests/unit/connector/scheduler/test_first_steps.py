"""Workers hear once of each request with an adapter and a reservation: at its first step, or when none follows."""

from __future__ import annotations

import pytest

from pdcluster_connector.core.adapters import AdapterRequest
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.failures import TransferFailure, take_counts
from pdcluster_connector.scheduler.first_steps import FirstSteps
from pdcluster_connector.steps import DecodeStep, FirstStep
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.params import to_wire
from unit.connector.scheduler.test_decode import TOKENS, Bench, R, decode_params

ADAPTER = AdapterRequest(3, "sql", "/adapters/sql", "use")
GROUP, WINDOW = KvGroup(16), KvGroup(16, is_windowed=True)


def bench_with(
    adapter: AdapterRequest | None = ADAPTER,
    *,
    external_tokens: int = 40,
    table: tuple[int, ...] = (1, 2, 3),
    group: KvGroup = GROUP,
    can_fail_running: bool = True,
) -> Bench:
    """Request R of 40 tokens in blocks of 16, of which a push shall bring the last ``external_tokens``."""
    bench = Bench()
    bench.scheduler.first_steps = FirstSteps(group, can_fail_running=can_fail_running)
    bench.scheduler.add(R, to_wire(decode_params()), TOKENS, adapter, now=0.0)
    bench.scheduler.reserve(R, [table], external_tokens, now=0.0)
    assert told(bench) == ((), ())
    return bench


def told(bench: Bench) -> tuple[tuple[FirstStep, ...], tuple[RequestId, ...]]:
    step: DecodeStep = bench.scheduler.step()
    return step.first_steps, step.left


def mixed(bench: Bench, *blocks: int) -> int:
    """How many requests go on although the workers have named ``blocks``."""
    take_counts()
    bench.scheduler.first_steps.blocks_named(blocks)
    return take_counts().get(TransferFailure.ADAPTER_MIXED.value, 0)


@pytest.mark.parametrize(
    ("external_tokens", "table", "group", "block"),
    [
        (40, (1, 2, 3), GROUP, 1),
        (8, (1, 2, 3), GROUP, 3),
        (40, (0, 2, 3), GROUP, 2),
        (40, (0, 2, 3), WINDOW, 3),
    ],
)
def test_a_first_step_is_told_once_with_a_block_that_the_push_has_filled(
    external_tokens: int, table: tuple[int, ...], group: KvGroup, block: int
) -> None:
    bench = bench_with(external_tokens=external_tokens, table=table, group=group)
    bench.scheduler.received([R])
    bench.scheduler.begin([R, RequestId("other")])
    assert told(bench) == ((FirstStep(R, decode_params().transfer_id, block),), ())
    bench.scheduler.begin([R])
    bench.scheduler.finish(R)
    assert told(bench) == ((), ())


def test_no_block_is_told_where_vllm_cannot_fail_a_request_that_runs() -> None:
    bench = bench_with(can_fail_running=False)
    bench.scheduler.received([R])
    bench.scheduler.begin([R])
    assert told(bench) == ((FirstStep(R, decode_params().transfer_id, None),), ())


@pytest.mark.parametrize("is_received", [True, False])
def test_a_request_that_ends_before_its_first_step_is_left(is_received: bool) -> None:
    """A worker may have its KV when decode's scheduler does not know it yet."""
    bench = bench_with()
    bench.scheduler.received([R] if is_received else [])
    bench.scheduler.finish(R)
    assert told(bench) == ((), (R,))


def test_a_request_whose_prompt_vllm_computes_again_is_left() -> None:
    """Another rank may have all of its KV."""
    bench = bench_with()
    bench.scheduler.received([R], [R])
    bench.scheduler.begin([R])
    assert told(bench) == ((), (R,))
    bench.scheduler.finish(R)
    assert told(bench) == ((), ())


@pytest.mark.parametrize(("adapter", "external_tokens"), [(None, 40), (ADAPTER, 0)])
def test_nothing_is_told_of_a_request_without_an_adapter_or_a_push(
    adapter: AdapterRequest | None, external_tokens: int
) -> None:
    bench = bench_with(adapter, external_tokens=external_tokens)
    bench.scheduler.begin([R])
    bench.scheduler.finish(R)
    assert told(bench) == ((), ())


def test_a_request_that_vllm_has_preempted_before_it_heard_of_its_block_is_counted() -> None:
    bench = bench_with()
    bench.scheduler.received([R])
    assert mixed(bench, 1) == 0, "it has not begun"
    bench.scheduler.begin([R])
    bench.scheduler.step()
    bench.scheduler.step()  # vLLM schedules one step ahead
    assert [mixed(bench, 2, 3), mixed(bench, 1), mixed(bench, 1)] == [0, 1, 0], "once"


def test_a_request_that_vllm_has_ended_or_whose_blocks_may_be_anothers_is_not_counted() -> None:
    bench = bench_with()
    bench.scheduler.received([R])
    bench.scheduler.begin([R])
    for _ in range(4):
        bench.scheduler.step()
    assert mixed(bench, 1) == 0, "its first step has ended long ago"
    bench = bench_with()
    bench.scheduler.begin([R])
    bench.scheduler.finish(R)
    assert mixed(bench, 1) == 0, "vLLM has ended it"
