"""Histograms that are written out without Prometheus' library, which reads them here."""

from __future__ import annotations

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from pdcluster_router.core.telemetry.histogram import COARSE, Histogram, histogram_text

HOSTILE = 'a"b\\c\nd{},='


def filled(*times: float) -> Histogram:
    histogram = Histogram(COARSE)
    for time in times:
        histogram.add(time)
    return histogram


def test_a_bound_belongs_to_its_own_bucket_and_nothing_is_too_long() -> None:
    histogram = filled(0.05, 0.051, 1e9)
    assert histogram.buckets()[:2] == [("0.05", 1), ("0.1", 2)]
    assert histogram.buckets()[-2:] == [("60.0", 2), ("+Inf", 3)]


def test_the_text_is_what_the_library_writes() -> None:
    series = [({"role": "decode", "engine": HOSTILE}, filled(0.2, 3.0)), ({"role": "prefill", "engine": ""}, filled())]

    class Known(Collector):
        def collect(self) -> list[HistogramMetricFamily]:
            family = HistogramMetricFamily("x_seconds", "How long.", labels=("role", "engine"))
            for labels, histogram in series:
                family.add_metric(tuple(labels.values()), histogram.buckets(), sum_value=histogram.total)
            return [family]

    registry = CollectorRegistry()
    registry.register(Known())
    ours = histogram_text("x_seconds", "How long.", series)
    theirs = generate_latest(registry).decode()
    assert list(text_string_to_metric_families(ours)) == list(text_string_to_metric_families(theirs))


def test_a_family_without_series_is_nothing() -> None:
    assert histogram_text("x_seconds", "How long.", []) == ""
