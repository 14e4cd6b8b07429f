"""The chart's alerts on what an operator and engines count, as Prometheus itself judges them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tools.chart.dashboard import expressions

from integration.test_router_alerts import CASES
from operator_cases.statuses import FAILED_STATUS, FIRST, WELL, WELL_STATUS
from pdcluster_connector import failures
from pdcluster_connector.failures import TransferFailure
from pdcluster_connector.vllm.metrics import CountMetrics
from pdcluster_operator.core.status.conditions import Status
from pdcluster_operator.core.status.gauges import PoolSample, sample_of
from pdcluster_operator.core.status.pool_status import reduce_status
from pdcluster_operator.http_kube import ApiCall
from pdcluster_operator.kinds import PDCLUSTER
from pdcluster_operator.metrics import Metrics
from pdcluster_operator.work_queue import RunOutcome
from prometheus.alerts import NAMES, RULES, are_readable, as_shown, came_and_went, without_a_number
from prometheus.evaluation import STEP_S, Sample, Scrapes, samples_of

OPERATOR: Final = {"namespace": "pdcluster-system", "pod": "operator-0"}
ENGINE: Final = {"namespace": "team", "pod": "tiny-decode-0", "pdcluster_dev_cluster": "tiny"}
NUM_BEFORE: Final = 4
NUM_DURING: Final = 64
"""32 minutes: longer than any range and ``for`` of these alerts together."""
NUM_AFTER: Final = 64
DEADLINE_S: Final = 600
REFUSED: Final = reduce_status(replace(WELL, refusal="no"), WELL_STATUS, now=1000)
STARTING: Final = reduce_status(FIRST, None, now=1000)


@dataclass
class Operator:
    """An operator's metrics, of a state that a test changes. ``pool``: the status of its only PDCluster."""

    leads: bool = True
    num_left_out: int = 0
    pool: Status = WELL_STATUS
    run: RunOutcome = RunOutcome.DONE
    now: int = 1000
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.metrics.watch_replica(lambda: self.leads, lambda: 1, lambda: 0.5, lambda: self.num_left_out)
        self.metrics.watch_pools(self._pools)

    def _pools(self) -> list[PoolSample]:
        """Of the second pool nothing may be told."""
        told = (("team", "tiny", self.pool), ("other", "well", WELL_STATUS))
        return [sample_of(namespace, name, status, DEADLINE_S, self.now) for namespace, name, status in told]

    def scraped(self) -> list[Sample]:
        """After a further run of its loop and ``STEP_S`` of its time."""
        self.now += STEP_S
        self.metrics.count_run(self.run, 0.1)
        self.metrics.count_call(ApiCall("get", PDCLUSTER, "GET", "/"), 200)
        return samples_of(self.metrics.page(), OPERATOR, honors=True)


ALSO: Final = {"PDClusterDegraded": {"PDClusterNotReady"}}
"""A verification that failed leaves a pool not ready, beyond its deadline."""
FAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "PDClusterNobodyLeads": {"leads": False},
    "PDClusterLooksFail": {"run": RunOutcome.FAILED},
    "PDClusterNamespaceLeftOut": {"num_left_out": 1},
    "PDClusterDegraded": {"pool": FAILED_STATUS},
    "PDClusterRefused": {"pool": REFUSED},
    "PDClusterNotReady": {"pool": STARTING},
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_operators_alert_comes_with_its_fault_and_goes_after_it(name: str) -> None:
    operator, scrapes = Operator(), Scrapes(int(time.time()))
    well = {attribute: getattr(operator, attribute) for attribute in FAULTS[name]}
    _scrape(scrapes, operator, NUM_BEFORE)
    begins_s = scrapes.now_s
    _scrape(scrapes, operator, NUM_DURING, FAULTS[name])
    _scrape(scrapes, operator, NUM_AFTER, well)
    told = scrapes.evaluate(RULES)
    assert told.errors == []
    place = "team/tiny" if "pool" in FAULTS[name] else OPERATOR["namespace"]
    came_and_went(told, {name} | ALSO.get(name, set()), place, begins_s, scrapes.now_s - STEP_S)


def _scrape(scrapes: Scrapes, operator: Operator, num_steps: int, changes: Mapping[str, Any] | None = None) -> None:
    for attribute, value in (changes or {}).items():
        setattr(operator, attribute, value)
    for _ in range(num_steps):
        scrapes.add(operator.scraped())


def test_an_operator_that_is_gone_is_told() -> None:
    scrapes = Scrapes(int(time.time()))
    _scrape(scrapes, Operator(), NUM_BEFORE)
    for _ in range(NUM_DURING):
        scrapes.add()
    told = scrapes.evaluate(RULES)
    assert told.errors == []
    assert told.firing().keys() == {"PDClusterNobodyLeads"}
    are_readable(told.firing()["PDClusterNobodyLeads"], "No operator leads")


class Engine:
    """A decode engine's page of metrics, as vLLM makes it of the connector's counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        types: Any = {kind: partial(kind, registry=self._registry) for kind in (Counter, Gauge, Histogram)}
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
        self._counts = CountMetrics(config, types, ["engine"], {0: ["0"]})

    def scraped(self, counts: Mapping[str, int]) -> list[Sample]:
        """After so much more has been counted."""
        self._counts.observe(dict(counts))
        return samples_of(generate_latest(self._registry), ENGINE)


DONE: Final = {
    failures.PUSHED_BYTES: 4096,
    failures.PUSHES_DONE: 3,
    failures.RECEIVES_DONE: 3,
    failures.LOCAL_PREFILLS: 1,
    failures.LOCAL_PREFILL_TOKENS: 16,
}
COUNTED: Final = {
    "PDClusterTransfersFail": {TransferFailure.PUSH_FAILED.value: 4},
    "PDClusterSecretsDiffer": {TransferFailure.TRANSFER_REFUSED.value: 1},
    "PDClusterAdaptersMix": {TransferFailure.ADAPTER_MIXED.value: 1},
}
"""Alert to the failures of each half a minute that it tells of."""


@pytest.mark.parametrize("name", COUNTED)
def test_an_engines_alert_comes_with_its_failures_and_goes_after_them(name: str) -> None:
    engine, operator, scrapes = Engine(), Operator(), Scrapes(int(time.time()))
    for _ in range(NUM_BEFORE):
        scrapes.add(engine.scraped(DONE), operator.scraped())
    begins_s = scrapes.now_s
    for _ in range(NUM_DURING):
        scrapes.add(engine.scraped({**DONE, **COUNTED[name]}), operator.scraped())
    for _ in range(NUM_AFTER):
        scrapes.add(engine.scraped(DONE), operator.scraped())
    told = scrapes.evaluate(RULES)
    assert told.errors == []
    came_and_went(told, {name}, "team/tiny", begins_s, scrapes.now_s - STEP_S)


def test_each_alert_has_a_case() -> None:
    alone = {"PDClusterDiscoveryDown", "PDClusterCertificateExpires", "PDClusterTokenKeysOld"}
    assert {*FAULTS, *COUNTED, *CASES, *alone} == NAMES


def test_each_panel_of_operators_and_engines_shows_a_number() -> None:
    engine, operator, scrapes = Engine(), Operator(), Scrapes(int(time.time()))
    for status in (WELL_STATUS, WELL_STATUS, WELL_STATUS, FAILED_STATUS, REFUSED, WELL_STATUS):
        operator.pool = status
        scrapes.add(engine.scraped(DONE), operator.scraped())
    asked = [as_shown(one) for one in expressions() if "pdcluster_router_" not in one]
    told = scrapes.evaluate(RULES, asked)
    assert without_a_number(told) == []
