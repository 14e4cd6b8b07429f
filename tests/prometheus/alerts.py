"""The chart's alerts and panels, and what a test asks of each of them."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan
from typing import Final

import yaml

from chart_cases.rendering import CHART
from prometheus.evaluation import STEP_S, Alert, Evaluation

RULES: Final = CHART / "files" / "alerts.yaml"
NAMES: Final = frozenset(
    rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
)
_UNRENDERED: Final = ("{{", "}}", "<no value>", "<error")
"""What a template leaves that could not be filled in."""


def came_and_went(told: Evaluation, names: Iterable[str], place: str, begins_s: int, last_s: int) -> None:
    """Alerts with these names came after ``begins_s``, no others came, and all were gone at ``last_s``. ``place``: as
    ``are_readable``."""
    firing = told.firing()
    assert firing.keys() == set(names)
    assert all(begins_s <= alerts[0].at_s <= alerts[-1].at_s < last_s for alerts in firing.values())
    assert [alert for alert in told.alerts if alert.at_s == last_s] == []
    for alerts in firing.values():
        are_readable(alerts, place)


def are_readable(alerts: Iterable[Alert], place: str) -> None:
    """They name ``place``, and each template is filled in. Prometheus writes nothing for a label that is not there."""
    for alert in alerts:
        assert place in alert.annotations["summary"]
        assert not [mark for mark in _UNRENDERED for text in alert.annotations.values() if mark in text]


def as_shown(expression: str) -> str:
    """As Grafana asks Prometheus, with nothing chosen and a scrape each ``STEP_S``."""
    for variable, value in {"$namespace": ".*", "$pool": ".*", "$__rate_interval": f"{4 * STEP_S}s"}.items():
        expression = expression.replace(variable, value)
    return expression


def without_a_number(told: Evaluation) -> list[str]:
    """The expressions that show nothing, or no number. Of none that was asked it says nothing."""
    assert told.found
    return [
        asked
        for asked, samples in told.found.items()
        if not samples or any(isnan(float(sample.value)) for sample in samples)
    ]
