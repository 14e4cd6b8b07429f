"""``GET /pdcluster/requests``: what a router remembers of requests, over real sockets."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
import pytest

from fakes.access_log import KEY, ask
from fakes.answers import STREAM_HEAD, chunk, models_answer
from fakes.faults import Fault, Gate
from fakes.http import request_bytes
from fakes.reservations import CACHED_TOKENS, PROMPT_TOKENS, SECRET
from fakes.router import COMPLETIONS, PROMPT, STREAM, Rig, raw, running_rig, send, until
from pdcluster_protocol.kept import REQUESTS_PATH, KeptAnswer, KeptRequest, path_for
from pdcluster_router.core.requests.dialect import PdclusterDialect

pytestmark = pytest.mark.anyio

NEEDLE: Final = "prompt-3f9a"
TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT: Final = f"00-{TRACE_ID}-b7ad6b7169203331-01"


async def asked(rig: Rig, name: str) -> KeptAnswer:
    answer = await (await rig.internal()).get(path_for(name))
    assert answer.status == 200
    return msgspec.json.decode(answer.body, type=KeptAnswer)


async def about(rig: Rig, name: str) -> KeptRequest:
    (request,) = (await asked(rig, name)).requests
    return request


def story(request: KeptRequest) -> list[str]:
    """What happened, in words: each moment's kind, engine and attempt."""
    return [" ".join(filter(None, (one.what, one.engine, str(one.attempt or "")))) for one in request.moments]


async def test_a_good_request_is_told_whole_and_needs_no_cause() -> None:
    async with running_rig() as rig:
        await ask(rig, x_request_id="R-7", traceparent=PARENT)
        answer = await asked(rig, "R-7")
        urls = {"decode-0": rig.decode.url, "prefill-0": rig.prefill.url}
    (request,) = answer.requests
    assert story(request) == [
        "decode_sent decode-0",
        "reserved decode-0",
        "prefill_sent prefill-0 1",
        "prefill_replied prefill-0 1",
        "first_byte decode-0",
    ]
    times = [moment.at_s for moment in request.moments]
    assert request.queue_s is not None
    assert request.total_s is not None
    assert [request.queue_s, *times, request.total_s] == sorted([request.queue_s, *times, request.total_s])
    assert (request.status, request.outcome, request.error, request.cause, request.cure) == (200, "ok", "", "", "")
    assert (request.model, request.path, request.is_stream, request.trace_id) == ("m", COMPLETIONS, False, TRACE_ID)
    assert (request.prompt_tokens, request.cached_tokens) == (PROMPT_TOKENS, CACHED_TOKENS)
    assert request.is_local_prefill is False
    assert request.ended_at_unix_s is not None
    assert answer.engines == urls
    assert answer.since_unix_s == {"served": request.ended_at_unix_s}


async def test_a_transfer_id_and_the_id_in_vllms_answer_find_it_too() -> None:
    async with running_rig() as rig:
        await ask(rig, x_request_id="R-7")
        request = await about(rig, "R-7")
        for name in (request.transfer_id, "cmpl-R-7", "chatcmpl-R-7"):
            assert await about(rig, name) == request
        for name in ("R", "R-77", "", "x" * 200, "cmpl-"):
            assert (await asked(rig, name)).requests == ()


async def test_an_id_that_is_used_twice_has_two_the_newest_first() -> None:
    async with running_rig(models=[models_answer("first", "second")] * 2) as rig:
        await ask(rig, {**PROMPT, "model": "first"}, x_request_id="a/b?c=d&e%20")
        await ask(rig, {**PROMPT, "model": "second"}, x_request_id="a/b?c=d&e%20")
        found = (await asked(rig, "a/b?c=d&e%20")).requests
    assert [request.model for request in found] == ["second", "first"]


async def test_each_attempt_is_told_and_what_was_made_good() -> None:
    async with running_rig(num_prefill=2) as rig:
        rig.prefills[0].faults_to_come = rig.prefills[1].faults_to_come = [Fault.ERROR_500]
        rig.prefills[1].faults_to_come = []
        await ask(rig, x_request_id="one")
        await ask(rig, x_request_id="two")
        both = [await about(rig, name) for name in ("one", "two")]
        since = (await asked(rig, "one")).since_unix_s.keys()
    (request,) = [one for one in both if one.cause]
    assert story(request)[2:] == [
        "prefill_sent prefill-0 1",
        "prefill_failed prefill-0 1",
        "prefill_sent prefill-1 2",
        "prefill_replied prefill-1 2",
        "first_byte decode-0",
    ]
    assert (request.outcome, sorted(since)) == ("ok", ["failed", "served"])
    assert "made good" in request.cause
    assert "(prefill-0): prefill-0 answered 500" in request.cause
    assert "engine's log" in request.cure


async def test_a_try_with_another_decode_engine_counts_its_attempts_anew() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].faults_to_come = [Fault.DIE_WITH_KV]
        rig.decodes[1].faults_to_come = [Fault.DIE]
        await ask(rig, x_request_id="R")
        request = await about(rig, "R")
    assert [one for one in story(request) if "decode-" in one and not one.startswith("reserved")] == [
        "decode_sent decode-0",
        "decode_lost decode-0 1",
        "decode_sent decode-1",
        "decode_lost decode-1",
    ]


ERROR_EVENT: Final = STREAM_HEAD + chunk(b'data: {"error": {"message": "no", "code": 500}}\n\n')


@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.RAW])
async def test_the_first_byte_of_an_answer_that_is_thrown_away_is_told_but_not_counted(fault: Fault) -> None:
    async with running_rig(num_decode=2) as rig:
        for engine in rig.decodes:
            engine.faults_to_come, engine.raw = [fault], ERROR_EVENT
        rig.decodes[1].faults_to_come = []
        for name in ("one", "two"):
            assert (await ask(rig, STREAM, x_request_id=name)).status == 200
        stories = [story(await about(rig, name)) for name in ("one", "two")]
        assert await rig.metric('pdcluster_router_phase_seconds_count{phase="first_byte"}') == 2
    assert sum(one.startswith("first_byte") for told in stories for one in told) == 3


async def test_a_request_that_decode_served_alone_says_so_and_an_engine_is_named_by_its_pod() -> None:
    async with running_rig() as rig:
        for engine in rig.router.services.all_engines():
            engine.pod = f"pod-of-{engine.name}"
        await ask(rig, {**PROMPT, "echo": True}, x_request_id="R")
        answer = await asked(rig, "R")
    assert answer.requests[0].is_local_prefill is True
    assert answer.engines == {"decode-0": "pod-of-decode-0"}


async def test_of_one_id_the_request_that_runs_comes_before_one_that_has_ended() -> None:
    async with running_rig() as rig:
        await ask(rig, x_request_id="R")
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, **{"x-request-id": "R"})
        await until(lambda: len(rig.prefill.seen) == 2)
        found = (await asked(rig, "R")).requests
        rig.prefill.open_gate(Gate.PREFILL)
        await client.receive()
    assert [request.outcome for request in found] == ["", "ok"]


async def test_a_request_that_failed_has_cause_and_cure() -> None:
    async with running_rig(on_prefill_failure="fail") as rig:
        rig.prefill.fault = Fault.ERROR_500
        assert (await ask(rig, x_request_id="R-8")).status == 502
        request = await about(rig, "R-8")
    assert (request.status, request.outcome, request.error) == (502, "prefill_failed", "prefill_failed")
    assert request.cause.startswith("the prefill engine refused, answered an error, or was cut off (prefill-0): ")
    assert request.cure
    assert story(request)[-2:] == ["prefill_failed prefill-0 1", "prefill_exhausted 1"]


async def test_decodes_own_error_is_its_own_and_its_words_are_not_kept() -> None:
    async with running_rig() as rig:
        rig.decode.fault = Fault.ERROR_404
        assert (await ask(rig, x_request_id="R-9")).status == 404
        request = await about(rig, "R-9")
        assert (await asked(rig, "R-9")).since_unix_s.keys() == {"refused"}
    assert (request.status, request.outcome, request.error) == (404, "engine_error", "engine_error")
    assert "client has to change" in request.cure


@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ({}, "no object", "invalid_request"),
        ({"x-request-timeout": "soon"}, PROMPT, "invalid_timeout"),
        ({}, {"prompt": "x" * 5000}, "body_too_large"),
    ],
)
async def test_a_refused_request_is_remembered_too(headers: dict[str, str], body: object, code: str) -> None:
    async with running_rig(max_body_bytes=4096) as rig:
        answer = await (await rig.client()).post(
            COMPLETIONS, body, {"x-request-id": "R", "traceparent": PARENT, **headers}
        )
        request = await about(rig, "R")
    assert (request.error, request.outcome, request.trace_id) == (code, "rejected", TRACE_ID)
    assert request.read_s is not None
    assert request.status == answer.status
    assert request.cause
    assert request.cure


async def test_a_request_without_a_good_key_is_remembered_and_the_key_is_not(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(KEY.encode()).hexdigest()}  team-a\n")
    async with running_rig(api_key_file=keys) as rig:
        await ask(rig, x_request_id="good", authorization=f"Bearer {KEY}")
        await ask(rig, x_request_id="bad", authorization="Bearer sk-guessed", traceparent=PARENT)
        await ask(rig, "no object", x_request_id="ugly", authorization=f"Bearer {KEY}")
        assert (await about(rig, "ugly")).client == "team-a"
        good, bad = await about(rig, "good"), await about(rig, "bad")
        raw_answers = [(await (await rig.internal()).get(path_for(name))).body for name in ("good", "bad")]
    assert bad.trace_id == TRACE_ID
    assert (good.client, bad.client, bad.error) == ("team-a", "", "invalid_api_key")
    assert not any(secret in body for body in raw_answers for secret in (KEY.encode(), b"sk-guessed"))


async def test_a_request_beyond_its_keys_limit_is_remembered(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(KEY.encode()).hexdigest()}  team-a requests_per_minute=1\n")
    async with running_rig(api_key_file=keys) as rig:
        for name in ("first", "second"):
            await ask(rig, x_request_id=name, authorization=f"Bearer {KEY}")
        request = await about(rig, "second")
    assert (request.status, request.outcome, request.error) == (429, "limited", "too_many_requests")
    assert (request.client, request.model) == ("team-a", "m")
    assert "requests_per_minute" in request.cause


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (b"expect: what\r\n", "expectation_failed"),
        (b"host: another\r\n", "invalid_http"),
        (b"a: b\r\n" * 300, "too_many_headers"),
        (b"a: " + b"x" * 99_999 + b"\r\n", "headers_too_large"),
        (b"transfer-encoding: chunked\r\n", "body_too_large"),
    ],
)
async def test_a_head_or_a_body_that_is_refused_at_once_is_remembered_with_its_trace(lines: bytes, code: str) -> None:
    head = b"POST %b HTTP/1.1\r\nhost: h\r\nx-request-id: R\r\ntraceparent: %b\r\n%b\r\n"
    async with running_rig(max_body_bytes=4096) as rig:
        client = await rig.client()
        body = b"1388\r\n" + b"x" * 5000 + b"\r\n" if code == "body_too_large" else b""
        await client.send(head % (COMPLETIONS.encode(), PARENT.encode(), lines) + body)
        answer = await client.receive()
        request = await about(rig, "R")
    assert answer.headers["x-request-id"] == "R"
    assert (request.status, request.error, request.outcome) == (answer.status, code, "rejected")
    assert (request.trace_id, request.path) == (TRACE_ID, COMPLETIONS)


async def test_a_connection_too_many_is_remembered() -> None:
    async with running_rig(max_connections=1) as rig:
        await (await rig.client()).get("/health")
        assert (await ask(rig, x_request_id="R")).status == 503
        assert (await about(rig, "R")).error == "too_many_connections"


async def test_a_name_of_another_field_finds_nothing_and_a_long_models_name_is_not_kept() -> None:
    async with running_rig(models=[models_answer(NEEDLE * 999)] * 2) as rig:
        await ask(rig, {**PROMPT, "model": NEEDLE * 999}, x_request_id="R")
        assert (await about(rig, "R")).model == "?"
        assert rig.router.services.kept.num_bytes < 1000
        for name in ("ok", "decode-0", "first_byte", COMPLETIONS):
            assert (await asked(rig, name)).requests == ()


class BrokenDialect(PdclusterDialect):
    """A bug of ours."""

    def client_line(self, request_id: bytes) -> bytes:
        raise RuntimeError(f"no line for {request_id!r}")


async def test_a_bug_of_ours_is_remembered_and_called_one() -> None:
    async with running_rig() as rig:
        rig.router.services.dialect = BrokenDialect(SECRET)
        assert (await ask(rig, x_request_id="R")).status == 500
        answer = await asked(rig, "R")
    (request,) = answer.requests
    assert (request.status, request.outcome, request.error) == (500, "", "internal_error")
    assert "bug of the router" in request.cure
    assert answer.since_unix_s.keys() == {"failed"}


class LateBrokenDialect(PdclusterDialect):
    """A bug of ours, when the request has its exchange."""

    def transfer_line(self, transfer_id: str) -> bytes:
        raise RuntimeError(f"no line for {transfer_id}")


async def test_a_bug_that_breaks_an_exchange_leaves_nothing_and_is_remembered_once() -> None:
    async with running_rig() as rig:
        rig.router.services.dialect = LateBrokenDialect(SECRET)
        assert (await ask(rig, x_request_id="R")).status == 500
        await rig.settled()
        request = await about(rig, "R")
    assert (request.outcome, story(request)) == ("", ["decode_sent decode-0"])
    assert "bug of the router" in request.cure


async def test_no_prompt_and_no_answer_is_in_the_memory() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decode.faults_to_come = [Fault.DIE_MID_STREAM, Fault.ERROR_404, Fault.ERROR_500]
        for number in range(4):
            await ask(rig, {**STREAM, "prompt": NEEDLE, "user": NEEDLE}, x_request_id=f"R-{number}", x_secret=NEEDLE)
        await (await rig.client()).post(COMPLETIONS, {"prompt": NEEDLE, "vllm_xargs": {"transfer_id": NEEDLE}})
        entries = [entry for ring in rig.router.services.kept._rings.values() for entry in ring.holding(b"")]
    assert len(entries) == 5
    assert not any(word in entry for entry in entries for word in (NEEDLE.encode(), b"Hello", b"127.0.0.1"))


# What runs.


async def test_a_request_that_runs_says_what_it_waits_for() -> None:
    async with running_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig, **{"x-request-id": "R"})
        await rig.prefill.next_request()
        request = await about(rig, "R")
        rig.prefill.open_gate(Gate.PREFILL)
        await client.receive()
        ended = await about(rig, "R")
    assert (request.ended_at_unix_s, request.outcome, request.status) == (None, "", None)
    assert story(request)[-1] == "prefill_sent prefill-0 1"
    assert request.cause == "it waits for the prefill engine (prefill-0)"
    assert ended.outcome == "ok"


async def test_a_request_in_the_queue_says_so_and_when_it_is_turned_away() -> None:
    async with running_rig(max_prefill_backlog_tokens=1, max_queued_requests=1) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        first = await send(rig)
        await rig.prefill.next_request()
        second = await send(rig, STREAM, **{"x-request-id": "second", "traceparent": PARENT})
        await until(lambda: rig.router.services.num_queued == 1)
        waits = await about(rig, "second")
        assert (await ask(rig, x_request_id="third")).status == 429
        away = await about(rig, "third")
        second.leave()
        await until(lambda: rig.router.services.num_queued == 0)
        left = await about(rig, "second")
        rig.prefill.open_gate(Gate.PREFILL)
        await first.receive()
    assert waits.cause.startswith("it waits in the router's queue")
    assert (away.error, away.outcome, away.status, story(away)) == ("queue_full", "overloaded", 429, ["queue_full"])
    assert (left.outcome, left.status, story(left)) == ("client_gone", None, ["client_gone"])
    assert (left.trace_id, left.is_stream, left.queue_s) == (TRACE_ID, True, left.total_s)
    assert left.moments[0].at_s == left.total_s
    assert left.total_s is not None
    assert left.total_s > 0


async def test_good_requests_do_not_push_out_one_that_failed() -> None:
    async with running_rig(kept_requests_bytes=1 << 14) as rig:
        rig.decode.faults_to_come = [Fault.DIE]
        await ask(rig, x_request_id="failed")
        for number in range(40):
            await ask(rig, x_request_id=f"good-{number}")
        kept = rig.router.services.kept
        assert (await about(rig, "failed")).outcome == "lost"
        assert (await about(rig, "good-39")).outcome == "ok"
        assert (await asked(rig, "good-0")).requests == ()
        assert kept.num_bytes <= 1 << 14


async def test_a_router_may_remember_nothing() -> None:
    async with running_rig(kept_requests_bytes=0) as rig:
        await ask(rig, x_request_id="R")
        await (await rig.client()).post(COMPLETIONS, "no object", {"x-request-id": "S"})
        assert [(await asked(rig, name)) for name in "RS"] == [KeptAnswer()] * 2


async def test_clients_cannot_ask() -> None:
    async with running_rig() as rig:
        assert (await (await rig.client()).get(f"{REQUESTS_PATH}?id=R")).status == 404


# Traces.


async def test_traceparent_goes_to_both_engines_as_it_came() -> None:
    odd = "00-" + "0" * 32 + "-b7ad6b7169203331-01"
    async with running_rig() as rig:
        for given in (PARENT, odd):
            client = await rig.client()
            await client.send(request_bytes(COMPLETIONS, raw().partition(b"\r\n\r\n")[2], {"traceparent": given}))
            await client.receive()
            for engine in (rig.decode, rig.prefill):
                assert engine.seen[-1].message.headers["traceparent"] == given
