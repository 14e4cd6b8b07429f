"""Spans of a router's requests, as a collector gets them, and what engines are told of the trace."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pytest

from fakes.access_log import KEY, Log, ask
from fakes.collector import FakeCollector, TakenSpan, running_collector
from fakes.engine import FakeEngine
from fakes.faults import Fault, Gate
from fakes.router import PROMPT, Rig, running_rig, send, until
from patience import PATIENCE_S
from pdcluster_protocol.kept import path_for
from pdcluster_router.telemetry import span_export
from pdcluster_router.telemetry.span_export import SpanExport

pytestmark = pytest.mark.anyio

TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"
CALLER: Final = "b7ad6b7169203331"
PARENT: Final = f"00-{TRACE_ID}-{CALLER}-01"
STATE: Final = "vendor=a,other=b"
SLACK_NS: Final = 50_000_000
"""The wall clock may be set a little between two looks at it."""


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    with running_collector() as collector:
        yield collector


@asynccontextmanager
async def traced_rig(collector: FakeCollector, **settings: Any) -> AsyncIterator[Rig]:
    """All spans have come when it has ended, also where this process stands still meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_export, "SpanExport", partial(SpanExport, close_s=PATIENCE_S))
        async with running_rig(otlp_endpoint=collector.url, **settings) as rig:
            yield rig


def named(spans: list[TakenSpan], name: str) -> list[TakenSpan]:
    return [span for span in spans if span.name == name]


def told(engine: FakeEngine, number: int = -1) -> str:
    return engine.seen[number].message.headers["traceparent"]


async def test_a_request_is_a_tree_of_spans_below_its_caller_and_engines_are_children_of_their_calls(
    collector: FakeCollector,
) -> None:
    async with traced_rig(collector) as rig:
        await ask(rig, traceparent=PARENT, tracestate=STATE)
        by_decode, by_prefill = told(rig.decode), told(rig.prefill)
        assert [one.seen[-1].message.headers["tracestate"] for one in (rig.decode, rig.prefill)] == [STATE] * 2
    own = collector.spans[0]
    assert (own.name, own.parent_id, own.kind) == ("POST /v1/completions", CALLER, 2)
    assert own.resource["service.name"] == "pdcluster-router"
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    (decode,), (prefill,) = named(collector.spans, "decode"), named(collector.spans, "prefill")
    assert by_decode == f"00-{TRACE_ID}-{decode.span_id}-01"
    assert by_prefill == f"00-{TRACE_ID}-{prefill.span_id}-01"
    assert (decode.parent_id, prefill.parent_id) == (own.span_id, own.span_id)
    assert (decode.attributes["pdcluster.engine"], prefill.attributes["pdcluster.engine"]) == ("decode-0", "prefill-0")
    assert Counter(span.name for span in collector.spans) == Counter(
        ["POST /v1/completions", "receive", "queue", "decode", "reservation", "first_token", "answer", "prefill"]
    )


async def test_spans_are_as_long_as_their_request_took_and_lie_where_it_was(collector: FakeCollector) -> None:
    async with traced_rig(collector) as rig:
        rig.prefill.work_s = 0.3
        before_ns = time.time_ns()
        await ask(rig, traceparent=PARENT)
        after_ns = time.time_ns()
    assert before_ns - SLACK_NS <= min(span.begin_ns for span in collector.spans)
    assert max(span.end_ns for span in collector.spans) <= after_ns + SLACK_NS


async def test_a_router_that_remembers_no_requests_makes_the_same_spans(
    collector: FakeCollector, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(KEY.encode()).hexdigest()} team requests_per_minute=1\n")
    key = f"Bearer {KEY}"
    async with traced_rig(collector, kept_requests_bytes=0, api_key_file=keys) as rig:
        assert (await ask(rig, authorization=key, traceparent=PARENT)).status == 200
        assert (await ask(rig, authorization=key, traceparent=PARENT)).status == 429
    owns = [span for span in collector.spans if span.parent_id == CALLER]
    assert [own.attributes["http.response.status_code"] for own in owns] == [200, 429]
    assert len(named(collector.spans, "prefill")) == 1


async def test_a_request_without_a_trace_begins_one_and_why_and_access_log_tell_its_id(
    collector: FakeCollector, tmp_path: Path
) -> None:
    log = Log(tmp_path / "log")
    async with traced_rig(collector, access_log=log.path) as rig:
        await ask(rig, x_request_id="R", tracestate=STATE)
        kept = (await (await rig.internal()).get(path_for("R"))).json()["requests"][0]
        assert "tracestate" not in rig.decode.seen[-1].message.headers
    own = collector.spans[0]
    assert own.parent_id == ""
    assert [kept["trace_id"], log.line["trace_id"]] == [own.trace_id] * 2


@pytest.mark.parametrize("parent", ["00-" + "0" * 32 + f"-{CALLER}-01", "garbage", f"ff-{TRACE_ID}-{CALLER}-01"])
async def test_an_invalid_parent_is_none(collector: FakeCollector, parent: str) -> None:
    async with traced_rig(collector) as rig:
        await ask(rig, traceparent=parent, tracestate=STATE)
        assert "tracestate" not in rig.prefill.seen[-1].message.headers
        assert told(rig.prefill).split("-")[1] == told(rig.decode).split("-")[1] != TRACE_ID
    assert collector.spans[0].parent_id == ""


async def test_a_caller_that_does_not_record_is_followed_and_its_parent_goes_on_as_it_came(
    collector: FakeCollector,
) -> None:
    parent = f"00-{TRACE_ID}-{CALLER}-00"
    async with traced_rig(collector) as rig:
        await ask(rig, traceparent=parent, tracestate=STATE)
        for engine in (rig.decode, rig.prefill):
            assert told(engine) == parent
            assert engine.seen[-1].message.headers["tracestate"] == STATE
    assert collector.bodies == []


async def test_of_requests_without_a_parent_a_part_is_chosen_and_engines_leave_the_others_alone(
    collector: FakeCollector,
) -> None:
    async with traced_rig(collector, trace_sample_ratio=0.0) as rig:
        await ask(rig)
        assert told(rig.decode) == told(rig.prefill)
        assert told(rig.decode).endswith("-02")
        await ask(rig, traceparent=PARENT)
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}


async def test_each_try_is_a_span_and_its_engine_is_told_its_id(collector: FakeCollector) -> None:
    async with traced_rig(collector, num_prefill=2, num_decode=2) as rig:
        rig.prefills[0].faults_to_come = [Fault.ERROR_500] * 4
        for _ in range(4):
            await ask(rig, traceparent=PARENT)
        headers = [told(engine, at) for engine in rig.prefills for at in range(len(engine.seen))]
    prefills = named(collector.spans, "prefill")
    assert sorted(headers) == sorted(f"00-{TRACE_ID}-{span.span_id}-01" for span in prefills)
    failed = [span for span in prefills if span.is_error]
    assert failed
    assert {span.attributes["error.type"] for span in failed} == {"prefill_failed"}
    assert [span.attributes["pdcluster.attempt"] for span in failed] == [1] * len(failed)
    owns = named(collector.spans, "POST /v1/completions")
    assert not any(span.is_error for span in owns)
    assert sum(("prefill_failed" in span.events) for span in owns) == len(failed)


async def test_a_decode_engine_that_dies_fails_its_call_and_the_next_one_has_its_own(collector: FakeCollector) -> None:
    async with traced_rig(collector, num_decode=2) as rig:
        for engine in rig.decodes:
            engine.faults_to_come = [Fault.DIE]
        assert (await ask(rig, traceparent=PARENT)).status == 502
        headers = [told(engine) for engine in rig.decodes]
    decodes = named(collector.spans, "decode")
    assert sorted(headers) == sorted(f"00-{TRACE_ID}-{span.span_id}-01" for span in decodes)
    assert {span.attributes["error.type"] for span in decodes} == {"decode_lost"}
    own = collector.spans[0]
    assert (own.is_error, own.attributes["http.response.status_code"]) == (True, 502)


async def test_parts_are_spans_between_their_whole_and_their_calls(collector: FakeCollector) -> None:
    async with traced_rig(collector) as rig:
        assert (await ask(rig, {**PROMPT, "n": 2}, traceparent=PARENT)).status == 200
        headers = [told(rig.decode, at) for at in range(2)]
    spans = collector.spans
    (own,) = named(spans, "POST /v1/completions")
    parts = named(spans, "part")
    assert (own.parent_id, own.attributes["pdcluster.parts"]) == (CALLER, 2)
    assert [part.parent_id for part in parts] == [own.span_id] * 2
    calls = named(spans, "decode")
    assert sorted(call.parent_id for call in calls) == sorted(part.span_id for part in parts)
    assert sorted(headers) == sorted(f"00-{TRACE_ID}-{call.span_id}-01" for call in calls)
    assert len({span.span_id for span in spans}) == len(spans)


async def test_a_request_that_the_queue_refuses_has_its_own_span(collector: FakeCollector) -> None:
    async with traced_rig(collector, max_prefill_backlog_tokens=1, max_queued_requests=0) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        first = await send(rig)
        await rig.prefill.next_request()
        assert (await ask(rig, traceparent=PARENT)).status == 429
        rig.prefill.open_gate(Gate.PREFILL)
        await first.receive()
    (own,) = [span for span in collector.spans if span.parent_id == CALLER]
    assert (own.is_error, own.attributes["error.type"], own.events) == (False, "queue_full", ["queue_full"])


async def test_requests_that_no_engine_could_get_fill_no_collector(collector: FakeCollector, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(KEY.encode()).hexdigest()} team\n")
    async with traced_rig(collector, api_key_file=keys) as rig:
        assert (await ask(rig, authorization="Bearer sk-guessed", traceparent=PARENT)).status == 401
        assert (await ask(rig, "no object", authorization=f"Bearer {KEY}", traceparent=PARENT)).status == 400
    assert collector.bodies == []


async def test_no_prompt_answer_key_or_header_is_in_any_span(collector: FakeCollector, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(KEY.encode()).hexdigest()} team\n")
    headers = tmp_path / "headers"
    headers.write_text("# for the collector\nx-collector-key: sesame-7\n")
    secrets = ("needle-1", "needle-2", "needle-3", "sesame-7", KEY, STATE)
    async with traced_rig(collector, api_key_file=keys, otlp_headers_file=headers, engine_api_key="needle-3") as rig:
        body = {**PROMPT, "prompt": "needle-1", "user": "needle-2"}
        sent = {"authorization": f"Bearer {KEY}", "x_needle": "needle-2", "traceparent": PARENT, "tracestate": STATE}
        for fault in (None, Fault.ERROR_500, Fault.DIE):
            rig.decode.faults_to_come = [] if fault is None else [fault]
            await ask(rig, body, **sent)
            rig.prefill.faults_to_come = [] if fault is None else [fault]
            await ask(rig, body, **sent)
    told_bytes = b"".join(collector.bodies)
    assert b"team" in told_bytes
    assert len(collector.spans) > 20
    assert [secret for secret in secrets if secret.encode() in told_bytes] == []
    assert collector.headers[0]["x-collector-key"] == "sesame-7"


def refuses(wire: Any) -> None:
    wire.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")


@pytest.mark.parametrize("answer", [refuses, lambda wire: wire.close()], ids=["refuses", "hangs_up"])
async def test_a_collector_that_takes_nothing_costs_spans_alone(
    collector: FakeCollector, answer: Callable[[Any], None]
) -> None:
    collector.answer = answer
    async with traced_rig(collector) as rig:
        for _ in range(3):
            assert (await ask(rig)).status == 200
        if answer is refuses:
            lost = rig.router.services.metrics.spans_lost
            await until(lambda: next(iter(lost.collect())).samples[0].value == 3)
            assert await rig.metric("pdcluster_router_spans_lost_requests_total") == 3


async def test_without_a_collector_the_parent_goes_on_as_it_came() -> None:
    async with running_rig() as rig:
        await ask(rig, traceparent=PARENT, tracestate=STATE)
        assert [told(engine) for engine in (rig.decode, rig.prefill)] == [PARENT] * 2
        assert rig.router.services.spans is None
