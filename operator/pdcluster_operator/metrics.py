"""The operator's metrics: names, units and labels.

Each PDCluster has ten series. Only the leading replica shows these series, and they end with the object. Labels of
the other metrics name no object, for there may be thousands of objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdcluster_operator.core.status.gauges import PoolSample
from pdcluster_operator.http_kube import ApiCall
from pdcluster_operator.work_queue import RunOutcome

_BUCKETS_S: Final = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class Metrics:
    """All metrics of one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "pdcluster_operator_api_calls",
            "Calls to the API server, by verb, resource, and status (0: no answer)",
            ["verb", "resource", "status"],
            registry=self._registry,
        )
        self._runs = Histogram(
            "pdcluster_operator_reconcile_seconds",
            "Seconds of one look at one PDCluster, by how it ended (done, conflict, failed)",
            ["outcome"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )

    def count_call(self, call: ApiCall, status: int) -> None:
        resource = f"{call.kind.plural}/{call.subresource}" if call.subresource else call.kind.plural
        self._calls.labels(call.verb, resource, str(status)).inc()

    def count_run(self, outcome: RunOutcome, seconds: float) -> None:
        self._runs.labels(outcome.value).observe(seconds)

    def watch_replica(
        self,
        is_leading: Callable[[], bool],
        num_keys: Callable[[], int],
        overdue_s: Callable[[], float],
        num_left_out: Callable[[], int],
    ) -> None:
        """Add four gauges, which are read for each page."""
        for name, what, read in (
            ("leading", "1 while this replica leads", is_leading),
            ("queue_keys", "PDClusters that are due now or later", num_keys),
            ("queue_overdue_seconds", "For how long the oldest PDCluster has been due or looked at", overdue_s),
            (
                "namespaces_left_out",
                "Namespaces of --namespace that are not watched: at our start we could not read them",
                num_left_out,
            ),
        ):
            Gauge(f"pdcluster_operator_{name}", what, registry=self._registry).set_function(read)

    def watch_pools(self, read: Callable[[], Iterable[PoolSample]]) -> None:
        """Add the gauges of each PDCluster, which are read for each page."""
        self._registry.register(_Pools(read))

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _Pools(Collector):
    """The gauges of each PDCluster, made anew for each page: a PDCluster that is gone is on no later page."""

    def __init__(self, read: Callable[[], Iterable[PoolSample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        own = ["namespace", "name"]
        conditions = GaugeMetricFamily(
            "pdcluster_operator_condition",
            "1 for the status (True, False, Unknown) that each condition of a PDCluster has",
            labels=[*own, "condition", "status"],
        )
        late = GaugeMetricFamily(
            "pdcluster_operator_not_ready_seconds",
            "Seconds without being ready since the last progress; 0 while ready, stopped, paused or refused",
            labels=own,
        )
        deadline = GaugeMetricFamily(
            "pdcluster_operator_progress_deadline_seconds", "rollout.progressDeadlineSeconds", labels=own
        )
        for pool in self._read():
            for condition, truth in pool.conditions:
                conditions.add_metric([pool.namespace, pool.name, condition, truth], 1)
            late.add_metric([pool.namespace, pool.name], pool.not_ready_s)
            deadline.add_metric([pool.namespace, pool.name], pool.deadline_s)
        return iter((conditions, late, deadline))
