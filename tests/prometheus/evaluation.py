"""Prometheus' own rules and queries over pages of metrics, in a time that a test decides.

``main.go`` is Prometheus' storage, PromQL engine and alerting rules as libraries, without its server: an alert that
waits for an hour is evaluated in a moment.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from go_program import GoProgram
from patience import PATIENCE_S

PROMETHEUS: Final = GoProgram("Prometheus", Path(__file__).resolve().parent)
STEP_S: Final = 30
"""Between two scrapes, as the chart's monitors have it; rules are evaluated after each."""
FIRING: Final = "firing"


@dataclass(frozen=True, slots=True)
class Sample:
    """``value``: a number as text, for JSON has neither infinity nor NaN."""

    labels: Mapping[str, str]
    value: str


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert that is pending or firing after one scrape."""

    at_s: int
    state: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """``found``: what each expression has after the last scrape. ``errors``: of rules and expressions."""

    errors: list[str]
    alerts: list[Alert]
    found: dict[str, list[Sample]]

    def firing(self) -> dict[str, list[Alert]]:
        """Each alert that has fired, by its name, the earliest first."""
        fired: dict[str, list[Alert]] = {}
        for alert in self.alerts:
            if alert.state == FIRING:
                fired.setdefault(alert.labels["alertname"], []).append(alert)
        return fired


class Scrapes:
    """What a Prometheus has scraped, one scrape each ``STEP_S``."""

    def __init__(self, begins_at_s: int) -> None:
        self.now_s = begins_at_s
        self._taken: list[dict[str, object]] = []

    def add(self, *samples: Iterable[Sample]) -> None:
        """Those of all targets; then ``STEP_S`` pass."""
        self._taken.append({"at_s": self.now_s, "samples": [asdict(one) for target in samples for one in target]})
        self.now_s += STEP_S

    def repeat(self, num_steps: int) -> None:
        """Nothing changes in so many further scrapes."""
        samples = self._taken[-1]["samples"]
        for _ in range(num_steps):
            self._taken.append({"at_s": self.now_s, "samples": samples})
            self.now_s += STEP_S

    def evaluate(self, rules: Path, expressions: Iterable[str] = ()) -> Evaluation:
        """Raises: CalledProcessError: The program could not read the question."""
        question = {"rules": [str(rules)], "scrapes": self._taken, "expressions": list(expressions)}
        told = subprocess.run(
            [PROMETHEUS.find()],
            input=json.dumps(question).encode(),
            stdout=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=True,
        )
        return _evaluation(json.loads(told.stdout))


def _evaluation(told: dict[str, list[dict[str, object]]]) -> Evaluation:
    found = {str(one["expression"]): [Sample(**each) for each in one["samples"]] for one in told["found"]}  # type: ignore[attr-defined]
    errors = [str(error) for error in told["errors"]] + [str(one["error"]) for one in told["found"] if one["error"]]
    return Evaluation(errors, [Alert(**one) for one in told["alerts"]], found)  # type: ignore[arg-type]


def samples_of(page: bytes, target: Mapping[str, str], *, honors: bool = False) -> list[Sample]:
    """A page of metrics as Prometheus keeps it. ``target``: labels of the target, which come before those of the page,
    unless Prometheus ``honors`` the page's."""
    families = text_string_to_metric_families(page.decode())
    return [
        Sample(_labels(sample.name, sample.labels, target, honors=honors), str(float(sample.value)))
        for family in families
        for sample in family.samples
    ]


def _labels(name: str, own: Mapping[str, str], target: Mapping[str, str], *, honors: bool) -> dict[str, str]:
    if honors:
        return {"__name__": name, **target, **own}
    kept = {f"exported_{label}" if label in target else label: value for label, value in own.items()}
    return {"__name__": name, **kept, **target}
