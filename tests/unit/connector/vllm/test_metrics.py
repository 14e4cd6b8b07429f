"""The connector's counts as an engine's own metrics."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.registry import REGISTRY

from pdcluster_connector.failures import PUSHES_DONE, TransferFailure
from pdcluster_connector.vllm.metrics import CountMetrics


def test_each_data_parallel_engine_has_counts_of_its_own() -> None:
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    types: dict[type, type] = {kind: kind for kind in (Counter, Gauge, Histogram)}
    metrics = CountMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]})
    metrics.observe({PUSHES_DONE: 2, TransferFailure.PUSH_FAILED.value: 3}, engine_idx=1)
    done = [REGISTRY.get_sample_value("pdcluster:pushes_done_total", {"engine": engine}) for engine in "01"]
    failed = [
        REGISTRY.get_sample_value("pdcluster:failures_total", {"engine": engine, "kind": "push_failed"})
        for engine in "01"
    ]
    assert (done, failed) == ([None, 2.0], [0.0, 3.0])
