"""Alerts and dashboard ask for what routers and engines really count, and find it where the operator puts it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tools.chart.dashboard import PANELS, expressions

from chart_cases.rendering import CHART, ROOT, named, of_kind
from operator_cases.statuses import FAILED_STATUS, WELL, WELL_STATUS
from pdcluster_connector.failures import TransferFailure as TransferKind
from pdcluster_operator.api.status import ConditionStatus
from pdcluster_operator.core.status.conditions import Status, Type
from pdcluster_operator.core.status.gauges import PoolSample, sample_of
from pdcluster_operator.core.status.pool_status import reduce_status
from pdcluster_operator.http_kube import ApiCall
from pdcluster_operator.kinds import PDCLUSTER
from pdcluster_operator.metrics import Metrics as OperatorMetrics
from pdcluster_operator.work_queue import RunOutcome as LookOutcome
from pdcluster_protocol import labels
from pdcluster_router.core.clients.key_limits import KeyLimits, KeyUses, LimitedBy
from pdcluster_router.core.engines.placement import Home, new_tally
from pdcluster_router.core.telemetry.histogram import Histogram
from pdcluster_router.telemetry.failures import FailureKind as RouterKind
from pdcluster_router.telemetry.metrics import EngineSample, Metrics, Outcome, Span

RULES = [
    rule for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
EXPRESSIONS = [*expressions(), *(rule["expr"] for rule in RULES)]
LABELS: dict[tuple[str, str], type[Enum]] = {
    ("pdcluster_router_failures_total", "kind"): RouterKind,
    ("pdcluster:failures_total", "kind"): TransferKind,
    ("pdcluster_router_requests_total", "outcome"): Outcome,
    ("pdcluster_router_phase_seconds_bucket", "phase"): Span,
    ("pdcluster_router_affinity_total", "role"): labels.Role,
    ("pdcluster_router_key_limited_total", "limit"): LimitedBy,
    ("pdcluster_router_affinity_total", "home"): Home,
    ("pdcluster_operator_reconcile_seconds_count", "outcome"): LookOutcome,
    ("pdcluster_operator_condition", "condition"): Type,
    ("pdcluster_operator_condition", "status"): ConditionStatus,
}
"""Labels whose values are decided in the code."""
LEADING = "pdcluster_operator_leading"
WATCHED: dict[str, tuple[Any, ...]] = {
    "watch_certificate": (lambda: 2e9,),
    "watch_discovery": (lambda: True,),
    "watch_engines": (lambda: [EngineSample("prefill", "http://p:8000", "r1", "serving", True, False, Histogram())],),
    "watch_homes": ({role: new_tally() for role in labels.Role},),
    "watch_in_flight": (lambda: 0,),
    "watch_keep_alives": (lambda: 0,),
    "watch_keys": (KeyUses({"team-a": KeyLimits(max_concurrent=1)}), lambda: {"team-a"}),
    "watch_model_queues": (lambda: [("llama", 0)],),
    "watch_token_keys": (lambda: 0.0,),
    "watch_queue": (lambda: 0, lambda: 0, lambda: 0),
}
"""What a router's metrics are given to read when they are asked for."""
KUBERNETES_LABELS = {"namespace", "pod", "pdcluster_dev_cluster"}


def router_series() -> dict[str, set[str]]:
    """Name of each series of a router to its labels."""
    metrics = Metrics()
    for name, watched in WATCHED.items():
        getattr(metrics, name)(*watched)
    metrics.waited("team-a", 0.5)
    metrics.models.of("llama")
    return series_in(metrics.render())


def operator_series() -> dict[str, set[str]]:
    """As ``router_series``."""
    metrics = OperatorMetrics()
    metrics.count_call(ApiCall("get", PDCLUSTER, "GET", "/"), 200)
    metrics.count_run(LookOutcome.DONE, 0.1)
    metrics.watch_pools(lambda: [PoolSample("team", "tiny", (("Ready", "False"),), 60, 600)])
    metrics.watch_replica(lambda: True, lambda: 1, lambda: 0.5, lambda: 0)
    return series_in(metrics.page())


def series_in(page: bytes) -> dict[str, set[str]]:
    families = text_string_to_metric_families(page.decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def all_series() -> dict[str, set[str]]:
    return router_series() | engine_series() | operator_series()


def engine_series() -> dict[str, set[str]]:
    """As ``router_series``, from the source: to import it is to import vLLM."""
    source = (ROOT / "connector" / "pdcluster_connector" / "vllm" / "metrics.py").read_text()
    names = re.findall(r'"(pdcluster:\w+)"', source)
    counters = {
        f"{name}_total": {"kind"} if name.endswith("failures") else set() for name in names if "_info" not in name
    }
    return {**counters, **{name: {"protocol"} for name in names if name.endswith("_info")}}


def test_every_part_counts_something() -> None:
    assert set(WATCHED) == {name for name in vars(Metrics) if name.startswith("watch_")}
    assert min(len(router_series()), len(engine_series()), len(operator_series())) >= 4
    assert "pdcluster_operator_queue_overdue_seconds" in operator_series()


def metrics_in(expression: str) -> list[str]:
    return re.findall(r"\bpdcluster(?:_router_|_operator_|:)\w+", expression)


def selections_in(expression: str) -> list[tuple[str, str, str]]:
    """Metric, label and value of each ``label="value"``; of ``=~`` one for each alternative."""
    found = []
    for metric, selector in re.findall(r"(pdcluster(?:_router_|_operator_|:)\w+)\{([^}]*)\}", expression):
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', selector):
            found += [(metric, label, value) for value in values.split("|")]
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_asks_for_what_is_counted(expression: str) -> None:
    known = all_series()
    assert metrics_in(expression)
    assert set(metrics_in(expression)) <= set(known)
    for metric, label, value in selections_in(expression):
        if label not in KUBERNETES_LABELS:
            assert value in {kind.value for kind in LABELS[metric, label]}
    grouped = {label for words in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.split(r",\s*", words)}
    of_metrics = set().union(*(known[metric] for metric in metrics_in(expression)))
    assert grouped <= of_metrics | KUBERNETES_LABELS | {"le"}


def test_the_check_of_expressions_is_not_blind() -> None:
    expression = 'sum by (a, b) (rate(pdcluster:x_total{kind=~"a|b", namespace="n"}[5m])) / pdcluster_router_y'
    assert metrics_in(expression) == ["pdcluster:x_total", "pdcluster_router_y"]
    assert ("pdcluster:x_total", "kind", "b") in selections_in(expression)
    assert "pdcluster_dev_cluster" not in metrics_in("sum by (pdcluster_dev_cluster) (pdcluster_router_y)")


def test_all_that_is_counted_is_on_the_dashboard() -> None:
    shown = {metric for expression in expressions() for metric in metrics_in(expression)}
    counted = {name for name in all_series() if not name.endswith(("_created", "_sum", "_count"))}
    # What the API server said is in the log; of an engine's probe the alert tells, for a graph of ones tells nothing.
    # Of a certificate that expires an alert tells as well.
    # A line of a trace or an access log that is lost is a fault of the disk, and of no request; a lost span is one of
    # the collector.
    assert counted - shown == {
        "pdcluster_router_discovery_failures_total",
        "pdcluster_router_engine_up",
        "pdcluster_router_tls_certificate_expiry_seconds",
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("PDCluster")
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description"}
    page = (ROOT / "docs" / "operations.md").read_text()
    kinds = [value for _, label, value in selections_in(rule["expr"]) if label == "kind"]
    assert [kind for kind in kinds if f"| `{kind}` |" not in page] == []


BOUNDS = {
    "PDClusterNoDecode": ("> 0", None),
    "PDClusterPrefillExhausted": ("> 0", "2m"),
    "PDClusterRequestsFail": ("> 0.01", "5m"),
    "PDClusterOverloaded": ("> 0", "5m"),
    "PDClusterEngineDown": ("== 0", "5m"),
    "PDClusterDiscoveryDown": ("== 0", "5m"),
    "PDClusterCertificateExpires": ("< 259200", "1h"),
    "PDClusterTokenKeysOld": ("> 90000", "5m"),
    "PDClusterTransfersFail": ("> 0.1", "5m"),
    "PDClusterSecretsDiffer": ("> 0 > 0", None),
    "PDClusterAdaptersMix": ("> 0", None),
    "PDClusterNobodyLeads": ("== 0", "5m"),
    "PDClusterLooksFail": ("> 10", "15m"),
    "PDClusterNamespaceLeftOut": ("> 0", "15m"),
    "PDClusterDegraded": ("> 0", "1m"),
    "PDClusterRefused": ("> 0", "5m"),
    "PDClusterNotReady": ("", "1m"),
}
"""Alert to what its expression is compared with, and for how long it has to be so."""


def test_an_alert_comes_at_its_bound_and_after_its_time() -> None:
    found = {
        rule["alert"]: (" ".join(re.findall(r"(?:[<>]=?|[=!]=) [\d.]+", rule["expr"])), rule.get("for"))
        for rule in RULES
    }
    assert found == BOUNDS


REFUSED = reduce_status(replace(WELL, refusal="no"), WELL_STATUS, now=2000)


@pytest.mark.parametrize(
    ("alert", "status"),
    [
        pytest.param("PDClusterDegraded", FAILED_STATUS, id="degraded"),
        pytest.param("PDClusterRefused", REFUSED, id="refused"),
    ],
)
def test_an_alert_on_a_condition_picks_the_pool_that_has_it_and_no_other(alert: str, status: Status) -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == alert]
    metrics = OperatorMetrics()
    pools = {"well": WELL_STATUS, "failed": FAILED_STATUS, "refused": REFUSED}
    metrics.watch_pools(lambda: [sample_of("team", name, found, 600, 3000) for name, found in pools.items()])
    asked = {(label, value) for _, label, value in selections_in(rule["expr"])}
    samples = [
        sample for family in text_string_to_metric_families(metrics.page().decode()) for sample in family.samples
    ]
    (metric,) = metrics_in(rule["expr"])
    picked = {one.labels["name"] for one in samples if one.name == metric and asked <= set(one.labels.items())}
    assert picked == {name for name, found in pools.items() if found is status}


def test_not_ready_is_told_after_the_pools_own_deadline() -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == "PDClusterNotReady"]
    late, deadline = rule["expr"].split(" > ")
    assert metrics_in(late) == ["pdcluster_operator_not_ready_seconds"]
    assert metrics_in(deadline) == ["pdcluster_operator_progress_deadline_seconds"]
    assert late.split(" (")[0] == deadline.split(" (")[0] == "max by"


def test_nobody_leads_is_told_when_no_operator_is_left_to_say_so() -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == "PDClusterNobodyLeads"]
    said, unsaid = rule["expr"].split(" or ")
    assert (said, unsaid) == (f"max by (namespace) ({LEADING}) == 0", f"absent({LEADING})")
    # What absent() makes has no labels, so no sentence may need one.
    texts = [re.sub(r"\{\{ with .*?\{\{ end \}\}", "", text) for text in rule["annotations"].values()]
    assert [text for text in texts if "$labels" in text] == []
    assert rule["for"] == "5m", "operators are replaced one after the other in less"


def test_prometheus_templates_reach_prometheus() -> None:
    (rule,) = of_kind("everything on", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert "{{ $labels.namespace }}" in rule["spec"]["groups"][0]["rules"][0]["annotations"]["summary"]


def test_the_dashboard_is_what_grafanas_sidecar_takes() -> None:
    found = named("everything on", "ConfigMap", "pdcluster-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    page = json.loads(found["data"]["pdcluster.json"])
    assert [panel["title"] for panel in page["panels"]] == [panel.title for panel in PANELS]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in page["panels"]}
    assert len(places) == len(PANELS)
    assert page == json.loads(Path(CHART / "files" / "dashboard.json").read_text())


HAS_TLS: Final = {
    "sourceLabels": [f"__meta_kubernetes_service_label_{re.sub('[^a-z]', '_', labels.SCHEME)}"],
    "regex": "https",
}
"""Prometheus' name for the label of a Service; it writes ``_`` for what its own names cannot have."""
LEFT_OUT: Final = {"relabelings": [{**HAS_TLS, "action": "drop"}]}
WHERE_A_POOL_HAS_TLS: Final[dict[str, dict[str, Any]]] = {
    "router": {
        "tlsConfig": {"insecureSkipVerify": True},
        "relabelings": [{**HAS_TLS, "targetLabel": "__scheme__", "replacement": "https"}],
    },
    "prefill": LEFT_OUT,
    "decode": LEFT_OUT,
}
"""What an endpoint says beside the rest."""


def test_monitors_find_services_by_the_labels_that_the_operator_gives() -> None:
    monitors = {found["metadata"]["name"]: found["spec"] for found in of_kind("everything on", "ServiceMonitor")}
    for component in ("router", *(role.value for role in labels.Role)):
        spec = monitors[f"pdcluster-{component}"]
        selector = {labels.PART_OF: labels.APP_NAME, labels.COMPONENT: component}
        assert spec["selector"]["matchLabels"] == selector
        assert spec["namespaceSelector"] == {"any": True}
        assert spec["targetLabels"] == [labels.CLUSTER, labels.ROLE, labels.REVISION]
    for name, spec in monitors.items():
        # Else Prometheus calls the operator's own namespace that of every PDCluster.
        honors = {"honorLabels": True} if name == "pdcluster-operator" else {}
        port = "internal" if name == "pdcluster-router" else "http"
        over_tls = WHERE_A_POOL_HAS_TLS.get(name.removeprefix("pdcluster-"), {})
        assert spec["endpoints"] == [{"port": port, "path": "/metrics", "interval": "30s", **honors, **over_tls}]
    (service,) = of_kind("everything on", "Service")
    assert service["spec"]["ports"][0]["name"] == "http"
    assert monitors["pdcluster-operator"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert all(
        found["metadata"]["labels"]["release"] == "prometheus" for found in of_kind("everything on", "ServiceMonitor")
    )


def test_in_namespaced_mode_only_these_namespaces_are_scraped() -> None:
    for found in of_kind("namespaced", "ServiceMonitor"):
        expected = ["pdcluster-system"] if found["metadata"]["name"].endswith("operator") else ["team-a", "team-b"]
        assert found["spec"]["namespaceSelector"] == {"matchNames": expected}
