"""The seconds of a request's spans, and the numbers of each model, as Prometheus reads them."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.core.clients.key_limits import KeyUses
from pdcluster_router.telemetry.metrics import Metrics, Span
from pdcluster_router.telemetry.model_metrics import MAX_MODELS, ModelMetrics


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


@pytest.mark.parametrize("family", ["first_byte_seconds", "answer_tokens"])
def test_of_many_models_only_a_hundred_have_numbers_of_their_own(family: str) -> None:
    metrics = Metrics()
    for number in (*range(300), *range(300)):
        numbers = metrics.models.of(f"adapter-{number}")
        numbers.first_byte.add(1.0)
        numbers.answer_tokens.add(7)
    found = re.findall(rf'model_{family}_count{{model="(.*)"}} (\d+)', metrics.render().decode())
    assert {name: int(count) for name, count in found} == {"": 400, **{f"adapter-{number}": 2 for number in range(100)}}


def test_a_model_that_is_known_keeps_its_numbers_when_there_are_too_many() -> None:
    models = ModelMetrics()
    first, *_ = [models.of(f"adapter-{number}") for number in range(2 * MAX_MODELS)]
    assert models.of("adapter-0") is first
    assert models.of("made up") is models.of("") is models.known[""]
    assert len(models.known) == MAX_MODELS + 1


def test_tokens_are_in_the_text_with_their_buckets_and_sums() -> None:
    metrics = Metrics()
    prompt = RequestTrace(transfer_id=TransferId("t"), received_at=0.0, prompt_tokens=300, cached_tokens=0)
    metrics.models.of('a "b"').answered(prompt, b'{"usage":{"completion_tokens":17}}', 0.16)
    samples = [one for family in text_string_to_metric_families(metrics.render().decode()) for one in family.samples]
    numbers = {
        (one.name.removeprefix("pdcluster_router_model_"), one.labels.get("le")): one.value
        for one in samples
        if one.labels.get("model") == 'a "b"'
    }
    assert numbers["prompt_tokens_bucket", "256.0"] == 0
    assert numbers["prompt_tokens_bucket", "512.0"] == 1
    assert numbers["prompt_tokens_sum", None] == 300
    assert numbers["cached_tokens_bucket", "0.0"] == 1
    assert numbers["answer_tokens_sum", None] == 17
    assert numbers["token_seconds_bucket", "0.005"] == 0
    assert numbers["token_seconds_bucket", "0.01"] == 1
    assert numbers["first_byte_seconds_count", None] == 0


def test_the_waits_of_all_clients_of_tokens_are_one_series() -> None:
    metrics = Metrics()
    metrics.watch_keys(KeyUses({}), lambda: {"team-a", "jwt:*"})
    for client in ("team-a", *(f"jwt:{number}" for number in range(300))):
        metrics.waited(client, 1.0)
    found = re.findall(r'queue_wait_seconds_count{client="(.*)"} (\S+)', metrics.render().decode())
    assert dict(found) == {"team-a": "1.0", "jwt:*": "300.0"}
