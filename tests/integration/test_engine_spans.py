"""The spans of engines, vLLM's own and the connector's, in the trace of a request: below the router's calls."""

from __future__ import annotations

from typing import Final

import pytest

from fakes.collector import FakeCollector, TakenSpan, running_collector
from integration.harness import Harness, post_json
from integration.prompts import PROMPT

pytestmark = [pytest.mark.engines, pytest.mark.slow]

NUM_TOKENS: Final = 4
ENV: Final = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
OF_VLLM: Final = "llm_request"
NUM_LAYERS: Final = 8
SLACK_NS: Final = 20_000_000
"""Router and engines each take the wall clock's offset by themselves, and a busy machine parts both readings."""
EXPECTED: Final = {OF_VLLM: 2, "decode": 1, "prefill": 1, "kv_push": 1, "kv_receive": 1, "kv_layer": NUM_LAYERS}


def named(collector: FakeCollector, name: str) -> list[TakenSpan]:
    return [span for span in collector.spans if span.name == name]


def test_the_span_of_each_engine_is_a_child_of_the_routers_call_to_it(harness: Harness) -> None:
    with running_collector() as collector:
        args = ("--otlp-traces-endpoint", f"{collector.url}/v1/traces")
        router_args = ("--otlp-endpoint", collector.url)
        with harness.start_pool(prefill_args=args, decode_args=args, env=ENV, router_args=router_args) as pool:
            body = {"prompt": list(PROMPT), "max_tokens": NUM_TOKENS, "temperature": 0}
            post_json(f"{pool.url}/v1/completions", body)
            collector.wait_for(lambda it: all(len(named(it, name)) == count for name, count in EXPECTED.items()))
    (own,) = named(collector, "POST /v1/completions")
    (decode,), (prefill,) = named(collector, "decode"), named(collector, "prefill")
    engines = {span.parent_id: span for span in named(collector, OF_VLLM)}
    assert set(engines) == {decode.span_id, prefill.span_id}
    assert {span.trace_id for span in engines.values()} == {own.trace_id}
    tokens = {
        call.name: engines[call.span_id].attributes["gen_ai.usage.completion_tokens"] for call in (decode, prefill)
    }
    assert tokens == {"decode": NUM_TOKENS, "prefill": 1}
    _require_transfer(collector, prefill, decode)


def _require_transfer(collector: FakeCollector, prefill: TakenSpan, decode: TakenSpan) -> None:
    """The connectors' spans: each layer within the push, all within the calls that asked for them."""
    (push,), (receive,), layers = (named(collector, name) for name in ("kv_push", "kv_receive", "kv_layer"))
    assert (push.parent_id, receive.parent_id) == (prefill.span_id, decode.span_id)
    assert {layer.parent_id for layer in layers} == {push.span_id}
    assert {span.trace_id for span in (push, receive, *layers)} == {decode.trace_id}
    assert sorted(layer.attributes["pdcluster.layer"] for layer in layers) == list(range(NUM_LAYERS))
    assert all(layer.events == ["write"] for layer in layers)
    assert sum(layer.attributes["pdcluster.bytes"] for layer in layers) == push.attributes["pdcluster.bytes"] > 0
    for inner, outer in [*((layer, push) for layer in layers), (receive, decode)]:
        assert outer.begin_ns - SLACK_NS <= inner.begin_ns <= inner.end_ns <= outer.end_ns + SLACK_NS
    assert push.begin_ns >= prefill.begin_ns - SLACK_NS
    assert receive.end_ns >= max(layer.end_ns for layer in layers) - SLACK_NS
    assert not any(span.is_error for span in (push, receive, *layers))
