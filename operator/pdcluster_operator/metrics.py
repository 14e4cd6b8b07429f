"""All of the operator's metrics: names, units and labels. No label names an object: there may be thousands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdcluster_operator.http_kube import Call
from pdcluster_operator.work_queue import Outcome

_BUCKETS_S: Final = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class Metrics:
    """Of one process."""

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

    def count_call(self, call: Call, status: int) -> None:
        resource = f"{call.kind.plural}/{call.subresource}" if call.subresource else call.kind.plural
        self._calls.labels(call.verb, resource, str(status)).inc()

    def count_run(self, outcome: Outcome, seconds: float) -> None:
        self._runs.labels(outcome.value).observe(seconds)

    def watch(self, name: str, what: str, read: Callable[[], float]) -> None:
        """A gauge that is read when somebody asks."""
        Gauge(f"pdcluster_operator_{name}", what, registry=self._registry).set_function(read)

    def page(self) -> bytes:
        return generate_latest(self._registry)
