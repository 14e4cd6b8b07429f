"""The connector's counts as vLLM's own metrics: they appear on each engine's ``/metrics``.

vLLM 0.32 (``v1/core/sched/scheduler.py``, ``v1/worker/kv_connector_model_runner_mixin.py``) asks both halves of the
connector after each step, adds up what they say, and hands the sum to ``observe`` in the API server's process.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import prometheus_client
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pdcluster_connector.failures import (
    LOCAL_PREFILL_TOKENS,
    LOCAL_PREFILLS,
    PUSHED_BYTES,
    PUSHES_DONE,
    RECEIVES_DONE,
    TransferFailure,
)
from pdcluster_connector.settings import parse_settings

_COUNTERS: Final = {
    PUSHED_BYTES: ("pdcluster:pushed_bytes", "KV bytes that decode has acknowledged"),
    PUSHES_DONE: ("pdcluster:pushes_done", "Pushes to one decode rank that ended well"),
    RECEIVES_DONE: ("pdcluster:receives_done", "Requests whose KV one decode rank has received whole"),
    LOCAL_PREFILLS: (
        "pdcluster:local_prefills",
        "Requests whose missing tokens decode has computed itself, for they were fewer than min_push_tokens",
    ),
    LOCAL_PREFILL_TOKENS: ("pdcluster:local_prefill_tokens", "Prompt tokens of those requests that decode computed"),
}
_PROTOCOL: Final = ("pdcluster:transfer_protocol_info", "1 for the protocol by which this engine moves KV")
_FAILURES: Final = ("pdcluster:failures", "Failures by kind: see docs/operations.md for what to do about each")


class StepCounts(KVConnectorStats):  # type: ignore[misc]  # vllm is not followed by mypy
    """Counts since the last step; ``data`` maps a count's name in ``failures.py``, or a failure kind, to a number."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: StepCounts) -> StepCounts:
        return StepCounts(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class CountMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vllm is not followed by mypy
    """One counter per count, one for failures with the kind as its label, and a gauge that names the protocol."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        values: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        counter = metric_types[prometheus_client.Counter]
        self._counters = {
            name: counter(name=metric, documentation=text, labelnames=labelnames)
            for name, (metric, text) in _COUNTERS.items()
        }
        self._show_protocol(vllm_config, metric_types[prometheus_client.Gauge], labelnames, values)
        metric, text = _FAILURES
        self._failures = counter(name=metric, documentation=text, labelnames=[*labelnames, "kind"])
        for labels in values.values():
            for kind in TransferFailure:  # shown as 0 before the first, so that a rate exists
                self._failures.labels(*labels, kind.value)

    def _show_protocol(
        self, vllm_config: VllmConfig, gauge: type, labelnames: list[str], values: dict[int, list[object]]
    ) -> None:
        metric, text = _PROTOCOL
        settings = parse_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        protocols = gauge(name=metric, documentation=text, labelnames=[*labelnames, "protocol"])
        for labels in values.values():
            protocols.labels(*labels, settings.transfer_protocol).set(1)

    def observe(self, transfer_stats_data: dict[str, int], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(amount)
            else:
                self._failures.labels(*labels, name).inc(amount)
