"""Workers hear when a request with an adapter and KV begins: until then they keep the adapter as it is."""

from __future__ import annotations

import pytest

from pdcluster_connector.core.adapters import AdapterRequest
from pdcluster_connector.steps import Begun
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.params import to_wire
from unit.connector.scheduler.test_decode import TOKENS, Bench, R, decode_params

ADAPTER = AdapterRequest(3, "sql", "/adapters/sql", "use")


def bench_with(adapter: AdapterRequest | None, external_tokens: int = 40) -> Bench:
    bench = Bench()
    bench.scheduler.add(R, to_wire(decode_params()), TOKENS, adapter, now=0.0)
    bench.scheduler.reserve(R, [[1, 2, 3]], external_tokens, now=0.0)
    assert bench.scheduler.step().begun == ()
    return bench


def test_workers_hear_once_that_a_request_with_an_adapter_and_kv_begins() -> None:
    bench = bench_with(ADAPTER)
    bench.scheduler.received([R])
    bench.scheduler.begin([R, RequestId("other")])
    assert bench.scheduler.step().begun == (Begun(R),)
    bench.scheduler.begin([R])
    bench.scheduler.finish(R)
    assert bench.scheduler.step().begun == ()


@pytest.mark.parametrize("is_received", [True, False])
def test_workers_hear_that_a_request_with_an_adapter_has_ended_before_it_began(is_received: bool) -> None:
    """A worker may have its KV when decode's scheduler does not know it yet."""
    bench = bench_with(ADAPTER)
    bench.scheduler.received([R] if is_received else [])
    bench.scheduler.finish(R)
    assert bench.scheduler.step().begun == (Begun(R),)


@pytest.mark.parametrize(("adapter", "external_tokens"), [(None, 40), (ADAPTER, 0)])
def test_workers_hear_nothing_of_a_request_without_an_adapter_or_a_push(
    adapter: AdapterRequest | None, external_tokens: int
) -> None:
    bench = bench_with(adapter, external_tokens)
    bench.scheduler.begin([R])
    bench.scheduler.finish(R)
    assert bench.scheduler.step().begun == ()
