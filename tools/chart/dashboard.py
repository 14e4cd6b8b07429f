"""The Grafana dashboard of the metrics of routers, engines and the operator: a panel for each question. Pure.

The panels are data here, so a metric is renamed in one place. A test checks that every name is a metric that one of
these processes has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

Document = dict[str, Any]

_POOL: Final = 'namespace=~"$namespace", pdcluster_dev_cluster=~"$pool"'
"""Selector of the pools that a panel shows. ServiceMonitors' ``targetLabels`` add the label of the pool."""
_TOKENS: Final = ("prompt", "cached", "answer")
_WIDTH: Final = 12
_HEIGHT: Final = 8
_COLUMNS: Final = 24 // _WIDTH
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Line:
    """One query. ``POOL`` in ``expression`` stands for the selector of the pools."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. ``unit``: in Grafana's spelling. ``about``: how to read it."""

    title: str
    about: str
    unit: str
    lines: tuple[Line, ...]


def _by(label: str, rated: str) -> Line:
    return Line(f"sum by ({label}) (rate({rated}{{POOL}}[$__rate_interval]))", f"{{{{{label}}}}}")


def _quantile(phase: str, quantile: float) -> Line:
    buckets = f'rate(pdcluster_router_phase_seconds_bucket{{POOL, phase="{phase}"}}[$__rate_interval])'
    return Line(f"histogram_quantile({quantile}, sum by (le) ({buckets}))", f"p{round(quantile * 100)}")


def _most_by(labels: str, histogram: str, which: str = "") -> Line:
    legend = " ".join([*(f"{{{{{label}}}}}" for label in labels.split(", ")), which]).strip()
    buckets = f"rate({histogram}_bucket{{POOL}}[$__rate_interval])"
    return Line(f"histogram_quantile(0.9, sum by (le, {labels}) ({buckets}))", legend)


def _sum(name: str, legend: str) -> Line:
    return Line(f"sum({name}{{POOL}})", legend)


PANELS: Final = (
    Panel(
        "Requests by how they ended",
        "Anything but ok that lasts has its kind in the next panel.",
        "reqps",
        (_by("outcome", "pdcluster_router_requests_total"),),
    ),
    Panel(
        "Failures by kind",
        "docs/operations.md says what to do about each. Most of them were made good before the client saw them.",
        "ops",
        (_by("kind", "pdcluster_router_failures_total"),),
    ),
    Panel(
        "Time to the first byte",
        "What a client waits for its first token.",
        "s",
        tuple(_quantile("first_byte", q) for q in (0.5, 0.9, 0.99)),
    ),
    Panel(
        "Time of prefill",
        "From the order to prefill to its answer. The rest of the time to the first byte is waiting and hand-over.",
        "s",
        tuple(_quantile("prefill", q) for q in (0.5, 0.9, 0.99)),
    ),
    Panel(
        "Time to the first byte of each model",
        "Nine of ten requests wait no longer. Adapters count as models; without a name: a model that no engine lists.",
        "s",
        (_most_by("model", "pdcluster_router_model_first_byte_seconds"),),
    ),
    Panel(
        "Time of a token of each model",
        "Nine of ten are no slower: a token, on average over a stream that tells usage; a gap between two pieces.",
        "s",
        tuple(_most_by("model", f"pdcluster_router_model_{which}_seconds", which) for which in ("token", "gap")),
    ),
    Panel(
        "Tokens of prompts and answers of each model",
        "Nine of ten requests have no more: in the prompt, of these cached on decode, in an answer that tells usage.",
        "short",
        tuple(_most_by("model", f"pdcluster_router_model_{which}_tokens", which) for which in _TOKENS),
    ),
    Panel(
        "Answer of each engine",
        "Nine of ten calls take no longer: to prefill's whole answer, or to the first byte of decode's. One engine far "
        "above the others of its role has a slow machine or a slow link.",
        "s",
        (_most_by("role, engine", "pdcluster_router_engine_answer_seconds"),),
    ),
    Panel(
        "Requests in flight and waiting",
        "A queue that never empties means too few prefill engines.",
        "short",
        (
            _sum("pdcluster_router_in_flight", "in flight"),
            _sum("pdcluster_router_queue_length", "waiting for prefill"),
            Line("sum by (model) (pdcluster_router_model_queue_length{POOL})", "waiting for {{model}}"),
        ),
    ),
    Panel(
        "Prefill backlog",
        "At its limit with idle prefill engines: raise the limit.",
        "short",
        (_sum("pdcluster_router_prefill_backlog_tokens", "estimated tokens"),),
    ),
    Panel(
        "Engines by state",
        "As each router sees them, on average; serving ones get new work.",
        "short",
        (Line("avg by (role, revision, state) (pdcluster_router_engines{POOL})", "{{role}} {{state}} {{revision}}"),),
    ),
    Panel(
        "Routers that hear from the API server",
        "One that does not goes on with the engines it knows.",
        "short",
        (
            _sum("pdcluster_router_discovery_up", "current"),
            Line("count(pdcluster_router_discovery_up{POOL})", "all"),
        ),
    ),
    Panel(
        "Engines left alone",
        "By routers for which they failed again and again; prompt tokens that decode engines compute meanwhile.",
        "short",
        (
            _sum("pdcluster_router_engine_ejected", "left alone"),
            Line(
                "sum by (role) (increase(pdcluster_router_engine_ejections_total{POOL}[$__rate_interval]))",
                "{{role}} ejections",
            ),
            _sum("pdcluster_router_local_prefill_backlog_tokens", "tokens prefilled by decode"),
        ),
    ),
    Panel(
        "Where conversations went",
        "With the policy affinity: first is the engine that has their KV, next another one since that was full, full "
        "whichever had the least to do; none are requests of no conversation.",
        "reqps",
        (
            Line(
                "sum by (role, home) (rate(pdcluster_router_affinity_total{POOL}[$__rate_interval]))",
                "{{role}} {{home}}",
            ),
        ),
    ),
    Panel(
        "Refused by a limit of a key",
        "Requests of each API key or client of tokens with limits, by limit. The client was told when to come back.",
        "reqps",
        (
            Line(
                "sum by (client, limit) (rate(pdcluster_router_key_limited_total{POOL}[$__rate_interval]))",
                "{{client}} {{limit}}",
            ),
        ),
    ),
    Panel(
        "Running for each key",
        "Requests at once of each API key or client of tokens that has limits.",
        "short",
        (Line("sum by (client) (pdcluster_router_key_running{POOL})", "{{client}}"),),
    ),
    Panel(
        "Age of the identity provider's keys",
        "Since the key set was last read well from its URL. It grows while the URL fails. Empty without a URL.",
        "s",
        (Line("max by (pod) (pdcluster_router_token_keys_age_seconds{POOL})", "{{pod}}"),),
    ),
    Panel(
        "Wait in the queue for each key",
        "The average of requests that had to wait and wait no more. `jwt:*`: all tokens. No name: no key is asked.",
        "s",
        (
            Line(
                "sum by (client) (rate(pdcluster_router_queue_wait_seconds_sum{POOL}[$__rate_interval])) / "
                "sum by (client) (rate(pdcluster_router_queue_wait_seconds_count{POOL}[$__rate_interval]))",
                "{{client}}",
            ),
        ),
    ),
    Panel(
        "Comments to streams that wait",
        "Each is keep_alive_s without an event: many mean a queue before prefill, or engines that stand still.",
        "ops",
        (Line("sum(rate(pdcluster_router_keep_alives_total{POOL}[$__rate_interval]))", "comments"),),
    ),
    Panel(
        "KV pushed",
        "Bytes that decode has acknowledged, for each prefill engine.",
        "Bps",
        (_by("pod", "pdcluster:pushed_bytes_total"),),
    ),
    Panel(
        "How KV moves",
        "Engines by transfer protocol: rdma, tcp or ascend.",
        "short",
        (Line("count by (protocol) (pdcluster:transfer_protocol_info{POOL})", "{{protocol}}"),),
    ),
    Panel(
        "Transfers",
        "Pushes to one decode rank, requests that one decode rank has received whole, and those that decode engines "
        "computed themselves since they lacked less than minPushTokens.",
        "ops",
        (
            Line("sum(rate(pdcluster:pushes_done_total{POOL}[$__rate_interval]))", "pushes"),
            Line("sum(rate(pdcluster:receives_done_total{POOL}[$__rate_interval]))", "receives"),
            Line("sum(rate(pdcluster:local_prefills_total{POOL}[$__rate_interval]))", "computed by decode"),
        ),
    ),
    Panel(
        "Prompt tokens computed by decode",
        "Tokens that a decode engine lacked and computed itself, fewer than minPushTokens in a prompt. Streams on it "
        "wait for them.",
        "short",
        (_by("pod", "pdcluster:local_prefill_tokens_total"),),
    ),
    Panel(
        "Failures of transfers by kind",
        "docs/operations.md says what to do about each.",
        "ops",
        (_by("kind", "pdcluster:failures_total"),),
    ),
    Panel(
        "Done without the pair",
        "Requests that decode prefilled by itself as it should, and requests that went to a second decode engine.",
        "reqps",
        (
            Line("sum(rate(pdcluster_router_local_prefill_total{POOL}[$__rate_interval]))", "prefilled by decode"),
            Line("sum(rate(pdcluster_router_decode_resent_total{POOL}[$__rate_interval]))", "sent again"),
        ),
    ),
    Panel(
        "Lost lines and spans of routers",
        "What could not be written or sent in time; the router's log has the reason.",
        "short",
        (
            Line("sum(increase(pdcluster_router_access_log_lost_lines_total{POOL}[$__rate_interval]))", "access log"),
            Line("sum(increase(pdcluster_router_trace_lost_lines_total{POOL}[$__rate_interval]))", "trace file"),
            Line("sum(increase(pdcluster_router_spans_lost_requests_total{POOL}[$__rate_interval]))", "spans"),
        ),
    ),
    Panel(
        "PDClusters that are not as they should be",
        "Degraded, refused, or not ready; one that is stopped or being rolled out is not ready either.",
        "short",
        (
            Line(
                'count by (name) (pdcluster_operator_condition{condition="Degraded", status="True"})',
                "{{name}} degraded",
            ),
            Line(
                'count by (name) (pdcluster_operator_condition{condition="Accepted", status="False"})',
                "{{name}} refused",
            ),
            Line(
                'count by (name) (pdcluster_operator_condition{condition="Ready", status="False"})',
                "{{name}} not ready",
            ),
        ),
    ),
    Panel(
        "Not ready without progress",
        "Seconds, beside the progress deadline: above it the alert PDClusterNotReady comes.",
        "s",
        (
            Line("max by (name) (pdcluster_operator_not_ready_seconds)", "{{name}}"),
            Line("max by (name) (pdcluster_operator_progress_deadline_seconds)", "{{name}} deadline"),
        ),
    ),
    Panel(
        "The operator's looks at PDClusters",
        "By how they ended. Conflicts are normal; what fails again and again is in its log.",
        "ops",
        (Line("sum by (outcome) (rate(pdcluster_operator_reconcile_seconds_count[$__rate_interval]))", "{{outcome}}"),),
    ),
    Panel(
        "Time of a look",
        "Most of it is waiting for the API server.",
        "s",
        tuple(
            Line(
                f"histogram_quantile({quantile}, sum by (le) "
                "(rate(pdcluster_operator_reconcile_seconds_bucket[$__rate_interval])))",
                f"p{round(quantile * 100)}",
            )
            for quantile in (0.5, 0.99)
        ),
    ),
    Panel(
        "The operator's calls to the API server",
        "By verb and status; in a steady state there are few, and none that writes.",
        "ops",
        (
            Line(
                "sum by (verb, status) (rate(pdcluster_operator_api_calls_total[$__rate_interval]))",
                "{{verb}} {{status}}",
            ),
        ),
    ),
    Panel(
        "The operator's queue",
        "PDClusters that wait, and for how long the oldest has been due. One replica leads: more, or none, is wrong.",
        "short",
        (
            Line("sum(pdcluster_operator_queue_keys)", "waiting"),
            Line("max(pdcluster_operator_queue_overdue_seconds)", "overdue, seconds"),
            Line("sum(pdcluster_operator_leading)", "leading"),
            Line("max(pdcluster_operator_namespaces_left_out)", "namespaces left out"),
        ),
    ),
)


def dashboard(panels: Sequence[Panel] = PANELS) -> Document:
    """The dashboard as Grafana imports it (schema 39, Grafana 10 and later)."""
    return {
        "title": "pdcluster",
        "uid": "pdcluster",
        "description": "Made from tools/chart/dashboard.py by `make chart`.",
        "tags": ["pdcluster"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [_panel_document(number, panel) for number, panel in enumerate(panels)],
    }


def expressions(panels: Sequence[Panel] = PANELS) -> list[str]:
    """Every query of the dashboard."""
    return [_filled(line) for panel in panels for line in panel.lines]


def _filled(line: Line) -> str:
    return line.expression.replace("POOL", _POOL)


def _panel_document(number: int, panel: Panel) -> Document:
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.about,
        "type": "timeseries",
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": _filled(line), "legendFormat": line.legend}
            for place, line in enumerate(panel.lines)
        ],
    }


def _variables() -> list[Document]:
    series = "pdcluster_router_in_flight"
    within = f'{series}{{namespace=~"$namespace"}}'
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        _choice("namespace", "Namespace", f"label_values({series}, namespace)"),
        _choice("pool", "Pool", f"label_values({within}, pdcluster_dev_cluster)"),
    ]


def _choice(name: str, label: str, query: str) -> Document:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
    }
