"""The real OpenTelemetry collector takes the router's spans as they are meant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from collector.binary import real_collector, spans_in
from fakes.access_log import ask
from fakes.faults import Fault
from fakes.router import running_rig
from integration.ports import fresh_port
from patience import PATIENCE_S
from pdcluster_router.telemetry.otlp import Sent, SpanCollector

pytestmark = [pytest.mark.anyio, pytest.mark.control_plane]

TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"
CALLER: Final = "b7ad6b7169203331"


@pytest.fixture
def port() -> int:
    return fresh_port()


@pytest.fixture
def taken(port: int, tmp_path: Path) -> Iterator[Path]:
    with real_collector(tmp_path, port) as taken:
        yield taken


async def listening(url: str) -> None:
    collector = SpanCollector(f"{url}/v1/traces", {}, None)
    async with asyncio.timeout(PATIENCE_S):
        while collector.post(b"") != (Sent.TAKEN, 0):
            await asyncio.sleep(0.05)
    collector.close()


async def test_the_real_collector_takes_a_request_as_a_tree_of_spans(port: int, taken: Path) -> None:
    url = f"http://127.0.0.1:{port}"
    await listening(url)
    async with running_rig(otlp_endpoint=url, num_prefill=2, otlp_resource="k8s.pod.name=r-0") as rig:
        rig.prefills[0].faults_to_come = [Fault.ERROR_500]
        rig.prefills[1].faults_to_come = [Fault.ERROR_500]
        await ask(rig, traceparent=f"00-{TRACE_ID}-{CALLER}-01")
        headers = {one.message.headers["traceparent"] for engine in rig.prefills for one in engine.seen}
    spans = await asyncio.to_thread(spans_in, taken, 8)
    own = spans[0]
    assert (own["name"], own["traceId"], own["parentSpanId"], own["kind"]) == (
        "POST /v1/completions",
        TRACE_ID,
        CALLER,
        2,
    )
    assert own["resource"]["service.name"] == "pdcluster-router"
    assert own["resource"]["k8s.pod.name"] == "r-0"
    assert own["events"][0]["name"] == "prefill_failed"
    prefills = [span for span in spans if span["name"] == "prefill"]
    assert headers == {f"00-{TRACE_ID}-{span['spanId']}-01" for span in prefills}
    assert all(span["status"]["code"] == 2 for span in prefills)
    assert {span["parentSpanId"] for span in prefills} == {own["spanId"]}
    begin_ns, end_ns = int(own["startTimeUnixNano"]), int(own["endTimeUnixNano"])
    assert all(begin_ns <= int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) <= end_ns for span in spans)


async def test_the_real_collector_refuses_what_is_no_otlp(port: int, taken: Path) -> None:
    await listening(f"http://127.0.0.1:{port}")
    collector = SpanCollector(f"http://127.0.0.1:{port}/v1/traces", {}, None)
    assert collector.post(b"\xff" * 9)[0] is Sent.REFUSED
    collector.close()
    wrong = SpanCollector(f"http://127.0.0.1:{port}/v2/traces", {}, None)
    assert wrong.post(b"")[0] is Sent.REFUSED
    wrong.close()
