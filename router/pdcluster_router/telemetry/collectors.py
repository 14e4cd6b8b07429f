"""Plain numbers as metrics, read when the metrics are. ``metrics.py`` declares which there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class LabelCounts(Collector):
    """A counter with one label: how often each member of an Enum has happened."""

    def __init__(self, name: str, text: str, label: str, numbers: Mapping[Any, int]) -> None:
        """``numbers``: by a member of an Enum, whose value is the label's. The numbers go on growing."""
        self._name = name
        self._text = text
        self._label = label
        self._numbers = numbers
        self._created_at = time.time()

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=(self._label,))
        for member, number in self._numbers.items():
            family.add_metric((member.value,), number, created=self._created_at)
        yield family


class Total(Collector):
    """A number that only grows, read when the metrics are."""

    def __init__(self, name: str, text: str, number: Callable[[], int]) -> None:
        self._name = name
        self._text = text
        self._number = number
        self._created_at = time.time()

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self._number(), created=self._created_at)


class LabelNumbers(Collector):
    """A gauge with one label."""

    def __init__(self, name: str, text: str, label: str, numbers: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """``numbers``: of each label, which has to be bounded."""
        self._name = name
        self._text = text
        self._label = label
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=(self._label,))
        for label, number in self._numbers():
            family.add_metric((label,), number)
        yield family
