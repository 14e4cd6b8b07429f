"""One request through router, decode and prefill, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fakes.answers import END
from fakes.faults import Fault, Gate
from fakes.http import RawClient
from fakes.reservations import PROMPT_TOKENS, SECRET, reservation_of
from fakes.router import CHAT, COMPLETIONS, Rig, post, running_rig, running_server, send, until
from pdcluster_router.core.engines.placement import Chooser, E, RequestFacts, Tally
from pdcluster_router.core.requests.keep_alive import COMMENT

pytestmark = pytest.mark.anyio

PROMPT = {"model": "m", "prompt": "once upon a time", "max_tokens": 8}
STREAM = {**PROMPT, "stream": True}


async def test_decode_reserves_then_prefill_fills_then_decode_answers(rig: Rig) -> None:
    client = await rig.client()
    answer = await client.post(COMPLETIONS, PROMPT)
    decode, prefill = rig.decode.seen[0], rig.prefill.seen[0]
    assert answer.status == 200
    assert answer.body == rig.decode.answer(decode)
    assert decode.params is not None
    assert decode.params["do_remote_prefill"] is True
    assert decode.params["metaserver"] == f"{rig.internal_url}/v1/metaserver"
    assert prefill.params is not None
    ours = {name: prefill.params[name] for name in ("deadline_ms", "token")}
    assert json.dumps(prefill.params) == json.dumps(reservation_of(decode.params, **ours))
    assert 0 < ours["deadline_ms"] <= decode.params["deadline_ms"]
    for params in (prefill.params, decode.params):
        SECRET.check(params["token"], params["transfer_id"], params["attempt"], params["deadline_ms"])
    assert (prefill.body["max_tokens"], prefill.body["stream"]) == (1, False)
    assert decode.outcome == {"status": "ok", "reason": "", "action": "fail", "attempt": 1}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_streamed_answer_reaches_the_client_byte_for_byte(rig: Rig, path: str) -> None:
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    answer = await (await rig.client()).post(path, {**body, **prompt})
    assert answer.status == 200
    assert answer.is_whole
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-engine"] == "fake"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.body == b"".join(rig.decode.events(rig.decode.seen[0]))
    assert rig.prefill.seen[0].body["stream_options"] is None


async def test_tokens_reach_the_client_while_decode_still_makes_them(rig: Rig) -> None:
    rig.decode.close_gate(Gate.SECOND_TOKEN)
    client = await send(rig, STREAM)
    head = await client.reader.readuntil(b"\r\n\r\n")
    first = await client.reader.readuntil(b"\n\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"Hello" in first
    rig.decode.open_gate(Gate.SECOND_TOKEN)
    assert (await client.reader.readuntil(b"0\r\n\r\n")).count(b"data:") == 4


async def test_nothing_is_sent_to_the_client_before_decodes_first_event(rig: Rig) -> None:
    rig.prefill.close_gate(Gate.PREFILL)
    client = await send(rig, STREAM)
    await rig.prefill.next_request()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.reader.read(1)
    rig.prefill.open_gate(Gate.PREFILL)
    assert (await client.receive()).status == 200


MEASURED = b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


async def begun_measured(rig: Rig) -> RawClient:
    """The client of a stream whose engine has said how long it will be, and its first event."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(MEASURED)
    rig.decode.fault, rig.decode.raw = Fault.RAW, head + MEASURED[:9]
    client = await send(rig, STREAM)
    await rig.decode.next_request()
    return client


async def test_comments_in_a_stream_do_not_count_in_the_length_that_its_engine_says() -> None:
    async with running_rig(keep_alive_s=0.1) as rig:
        client = await begun_measured(rig)
        await until(lambda: rig.router.keep_alives.num_comments >= 2)
        rig.decode.say(MEASURED[9:])
        answer = await client.receive()
        assert answer.body.replace(COMMENT, b"") == MEASURED
        assert answer.is_whole


async def test_an_error_in_a_stream_does_not_fill_the_length_that_its_engine_says(rig: Rig) -> None:
    client = await begun_measured(rig)
    begun = await client.reader.readuntil(MEASURED[:9])
    assert b"content-length" not in begun  # Else the error would make up for what is missing.
    rig.decode.hang_up_on_all()
    rest = await client.reader.read()
    assert b'"code":"decode_lost"' in rest
    assert not rest.endswith(END)


async def test_both_engines_get_the_clients_headers_and_one_request_id(rig: Rig) -> None:
    headers = {"authorization": "Bearer k", "x-request-id": "R-1", "traceparent": "00-1-2-01"}
    await (await rig.client()).post(COMPLETIONS, PROMPT, headers)
    for seen in (rig.decode.seen[0], rig.prefill.seen[0]):
        assert {name: seen.message.headers[name] for name in headers} == headers
        assert seen.message.headers["host"] != "test"


@pytest.mark.parametrize(
    "name",
    [
        "accept-encoding",
        "keep-alive",
        "te",
        "proxy-authorization",
        "proxy-connection",
        "x-request-timeout",
        "x-data-parallel-rank",
    ],
)
async def test_what_a_client_tells_the_router_alone_reaches_no_engine(rig: Rig, name: str) -> None:
    """With accept-encoding an engine could compress: the router reads the first event of a stream."""
    answer = await (await rig.client()).post(CHAT, STREAM, {name: "60", "x-kept": "60"})
    assert answer.status == 200
    for engine in (rig.decode, rig.prefill):
        headers = engine.seen[0].message.headers
        assert (name in headers, headers["x-kept"]) == (False, "60")


async def test_a_request_without_an_id_gets_the_same_one_on_both_engines(rig: Rig) -> None:
    await (await rig.client()).post(COMPLETIONS, PROMPT)
    ids = {seen.message.headers["x-request-id"] for seen in (rig.decode.seen[0], rig.prefill.seen[0])}
    assert len(ids) == 1
    assert ids != {""}


async def test_transfer_parameters_that_the_client_sent_are_replaced(rig: Rig) -> None:
    await (await rig.client()).post(COMPLETIONS, {**PROMPT, "kv_transfer_params": {"metaserver": "http://evil"}})
    params = rig.decode.seen[0].params
    assert params is not None
    assert params["metaserver"].startswith(rig.internal_url)


async def test_a_prompt_that_decode_has_cached_needs_no_prefill(rig: Rig) -> None:
    rig.decode.fault = Fault.CACHED
    answer = await (await rig.client()).post(COMPLETIONS, STREAM)
    assert answer.status == 200
    assert rig.prefill.seen == []


async def test_prefill_may_reply_after_decode_is_done(rig: Rig) -> None:
    rig.decode.fault = Fault.GO_ON_AFTER_PUSH
    rig.prefill.close_gate(Gate.REPLY)
    assert (await (await rig.client()).post(COMPLETIONS, PROMPT)).status == 200
    assert len(rig.router.services.running) == 1
    rig.prefill.open_gate(Gate.REPLY)
    await rig.settled()
    await rig.prefill.seen[0].ended.wait()
    assert not rig.prefill.seen[0].is_disconnected


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "echo": True},
        {"prompt": "a", "best_of": 2},
        {"prompt": ["a", "b"], "echo": True},
        {"prompt": "a", "n": 2, "temperature": 0},
        {"prompt": "a", "prompt_logprobs": 1},
    ],
)
async def test_what_has_to_be_served_as_a_whole_is_prefilled_by_decode_and_counted(
    rig: Rig, body: dict[str, object]
) -> None:
    answer = await (await rig.client()).post(COMPLETIONS, body)
    assert answer.status == 200
    assert rig.decode.seen[0].params is None
    assert rig.prefill.seen == []
    assert await rig.metric("pdcluster_router_local_prefill_total") == 1


async def test_requests_spread_over_engines_of_a_role() -> None:
    async with running_rig(num_decode=2, num_prefill=2) as rig:
        client = await rig.client()
        for _ in range(6):
            await client.post(COMPLETIONS, PROMPT)
        assert [len(engine.seen) for engine in (*rig.decodes, *rig.prefills)] == [3, 3, 3, 3]


def by_session(engines: Sequence[E], _: Tally | None = None, /) -> Chooser[E]:
    """The engine whose number the request's header names."""

    def choose(request: RequestFacts, /, *, now: float, chance: Callable[[], float]) -> E:
        return engines[int(request.headers.partition(b"x-session: ")[2][:1])]

    return choose


async def test_a_policy_sees_the_request_that_it_places() -> None:
    async with running_rig(num_decode=2, num_prefill=2) as rig:
        rig.router.services.roster.use(by_session)
        for session in ("0", "1", "1", "1"):
            await post(rig, PROMPT, {"X-Session": session})
        for engines in (rig.decodes, rig.prefills):
            seen = [[dict(seen.message.headers)["x-session"] for seen in engine.seen] for engine in engines]
            assert seen == [["0"], ["1", "1", "1"]]


async def test_the_deadline_that_decode_gets_is_the_clients_own_when_that_is_shorter() -> None:
    async with running_rig(request_timeout_s=100) as rig:
        client = await rig.client()
        await client.post(COMPLETIONS, PROMPT, {"x-request-timeout": "7.5"})
        await client.post(COMPLETIONS, PROMPT, {"x-request-timeout": "700"})
        short, capped = (seen.params or {} for seen in rig.decode.seen)
        assert 7000 < short["deadline_ms"] <= 7500
        assert 99_000 < capped["deadline_ms"] <= 100_000
        assert "x-request-timeout" not in rig.decode.seen[0].message.headers


async def test_each_ended_request_leaves_one_trace_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    async with running_rig(trace_file=trace) as rig:
        await (await rig.client()).post(COMPLETIONS, STREAM, {"x-request-id": "R-7"})
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(lines) == 1
    line = lines[0]
    steps = ("received_at", "reserved_at", "prefill_sent_at", "prefill_replied_at", "first_byte_at", "ended_at")
    times = [line[step] for step in steps]
    assert times == sorted(times)
    assert (line["event"], line["request_id"], line["status"]) == ("request", "R-7", 200)
    assert (line["prompt_tokens"], line["cached_tokens"]) == (PROMPT_TOKENS, 16)


async def test_metrics_tell_how_a_request_went(rig: Rig) -> None:
    await (await rig.client()).post(COMPLETIONS, PROMPT)
    await rig.settled()
    assert await rig.metric('pdcluster_router_requests_total{outcome="ok"}') == 1
    assert await rig.metric('pdcluster_router_phase_seconds_count{phase="reservation"}') == 1
    assert await rig.metric('pdcluster_router_phase_seconds_count{phase="prefill"}') == 1
    assert await rig.metric("pdcluster_router_in_flight") == 0


async def test_two_routers_bring_a_conversation_back_to_the_same_engines() -> None:
    async with running_rig(num_decode=4, num_prefill=4, policy="affinity") as rig:
        urls = {"prefill_urls": rig.router.settings.prefill_urls[::-1], "decode_urls": rig.router.settings.decode_urls}
        async with running_server(**urls, policy="affinity") as (_, other):
            clients = [await rig.client(), await RawClient.connect(other)]
            for turn in range(4):
                messages = [{"role": "user", "content": "Why? " * 300}] + [{"role": "user", "content": "And?"}] * turn
                answers = [await client.post(CHAT, {"messages": messages}) for client in clients]
                assert [answer.status for answer in answers] == [200, 200]
        for engines in (rig.decodes, rig.prefills):
            assert sorted(len(engine.seen) for engine in engines) == [0, 0, 0, 8]
        for role in ("prefill", "decode"):
            assert await homes_of(rig, role) == {"first": 4, "next": 0, "full": 0, "none": 0}


async def homes_of(rig: Rig, role: str) -> dict[str, int]:
    homes = ("first", "next", "full", "none")
    name = 'pdcluster_router_affinity_total{{home="{}",role="{}"}}'
    return {home: int(await rig.metric(name.format(home, role))) for home in homes}


async def test_it_is_counted_where_requests_without_a_conversation_go_and_tries_again_are_not() -> None:
    async with running_rig(num_decode=2, num_prefill=2, policy="affinity") as rig:
        for engine in rig.prefills:
            engine.faults_to_come = [Fault.ERROR_500]
        assert (await post(rig)).status == 502
        assert await homes_of(rig, "prefill") == {"first": 0, "next": 0, "full": 0, "none": 1}
        assert await homes_of(rig, "decode") == {"first": 0, "next": 0, "full": 0, "none": 1}
