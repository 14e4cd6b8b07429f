"""Workers hear once of each request with an adapter and a reservation: at its first step, or when none follows."""

from __future__ import annotations

import pytest

from pdcluster_connector.core.adapters import AdapterRequest
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.scheduler.decode import DecodeEngine
from pdcluster_connector.steps import DecodeStep, FirstStep
from pdcluster_protocol.ids import EngineId, RequestId, TransferId
from pdcluster_protocol.params import to_wire
from unit.connector.scheduler.test_decode import ADDRESS, SECRET, TOKENS, Bench, R, decode_params

ADAPTER = AdapterRequest(3, "sql", "/adapters/sql", "use")
T = TransferId("t")


def bench_with(
    adapter: AdapterRequest | None = ADAPTER,
    *,
    external_tokens: int = 40,
    table: tuple[int, ...] = (1, 2, 3),
    can_fail_running: bool = True,
) -> Bench:
    """Request R of 40 tokens in blocks of 16, of which a push shall bring the last ``external_tokens``."""
    bench = Bench()
    bench.scheduler._engine = DecodeEngine(
        EngineId("d"), 1, (KvGroup(16),), (ADDRESS,), SECRET, can_fail_running=can_fail_running
    )
    bench.scheduler.add(R, to_wire(decode_params()), TOKENS, adapter, now=0.0)
    bench.scheduler.reserve(R, [table], external_tokens, now=0.0)
    assert told(bench) == ((), ())
    return bench


def told(bench: Bench) -> tuple[tuple[FirstStep, ...], tuple[RequestId, ...]]:
    step: DecodeStep = bench.scheduler.step()
    return step.first_steps, step.left


@pytest.mark.parametrize(
    ("external_tokens", "table", "block"), [(40, (1, 2, 3), 1), (8, (1, 2, 3), 3), (40, (0, 2, 3), 2)]
)
def test_a_first_step_is_told_once_with_the_first_block_that_the_push_has_filled(
    external_tokens: int, table: tuple[int, ...], block: int
) -> None:
    bench = bench_with(external_tokens=external_tokens, table=table)
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
