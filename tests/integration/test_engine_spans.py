"""vLLM's own spans in the trace of a request: each below the router's call to that engine."""

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


def named(collector: FakeCollector, name: str) -> list[TakenSpan]:
    return [span for span in collector.spans if span.name == name]


def test_the_span_of_each_engine_is_a_child_of_the_routers_call_to_it(harness: Harness) -> None:
    with running_collector() as collector:
        args = ("--otlp-traces-endpoint", f"{collector.url}/v1/traces")
        router_args = ("--otlp-endpoint", collector.url)
        with harness.start_pool(prefill_args=args, decode_args=args, env=ENV, router_args=router_args) as pool:
            body = {"prompt": list(PROMPT), "max_tokens": NUM_TOKENS, "temperature": 0}
            post_json(f"{pool.url}/v1/completions", body)
            collector.wait_for(lambda it: len(named(it, OF_VLLM)) == 2 and len(named(it, "decode")) == 1)
    (own,) = named(collector, "POST /v1/completions")
    (decode,), (prefill,) = named(collector, "decode"), named(collector, "prefill")
    engines = {span.parent_id: span for span in named(collector, OF_VLLM)}
    assert set(engines) == {decode.span_id, prefill.span_id}
    assert {span.trace_id for span in engines.values()} == {own.trace_id}
    tokens = {
        call.name: engines[call.span_id].attributes["gen_ai.usage.completion_tokens"] for call in (decode, prefill)
    }
    assert tokens == {"decode": NUM_TOKENS, "prefill": 1}
