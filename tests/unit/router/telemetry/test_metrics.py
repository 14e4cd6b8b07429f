"""The seconds of a request's spans, as Prometheus reads them."""

from __future__ import annotations

import re

from pdcluster_router.telemetry.metrics import Metrics, Span


def test_a_span_counts_in_its_bucket_and_in_all_longer_ones_and_in_the_sum() -> None:
    metrics = Metrics()
    for seconds in (0.005, 0.2, 1000.0):
        metrics.took(Span.TOTAL, seconds)
    said = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if not line.startswith("#"))
    name = "pdcluster_router_phase_seconds"
    buckets = {
        bound: said[f'{name}_bucket{{le="{bound}",phase="total"}}']
        for bound in ("0.005", "0.1", "0.25", "600.0", "+Inf")
    }
    assert buckets == {"0.005": "1.0", "0.1": "1.0", "0.25": "2.0", "600.0": "2.0", "+Inf": "3.0"}
    assert said[f'{name}_sum{{phase="total"}}'] == "1000.205"
    assert said[f'{name}_count{{phase="prefill"}}'] == "0.0"


def test_of_many_models_only_a_hundred_have_seconds_of_their_own() -> None:
    metrics = Metrics()
    for number in (*range(300), *range(300)):
        metrics.first_bytes_of(f"adapter-{number}").add(1.0)
    found = re.findall(r'model_first_byte_seconds_count{model="(.*)"} (\d+)', metrics.render().decode())
    assert {name: int(count) for name, count in found} == {"": 400, **{f"adapter-{number}": 2 for number in range(100)}}
