"""Requests to pooling models through a real router: one decode engine serves each, whole and as it is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import pytest

from fakes.access_log import Log, logged_rig, some
from fakes.answers import END, STREAM_HEAD, answer, chunk, json_answer, models_answer
from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.pooling import PATHS
from fakes.reservations import PROMPT_TOKENS
from fakes.router import CHAT, Rig, orders, post, running_rig, until
from integration.test_router_access import KEY, bearer, line
from integration.test_router_engine_file import running_file_rig
from patience import PATIENCE_S
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.breaker import NUM_IN_A_ROW, Circuit

pytestmark = pytest.mark.anyio

EMBEDDINGS: Final = "/v1/embeddings"
LLAMA, E5 = models_answer("llama"), models_answer("e5")
RAW: Final = b'{ "input" : ["\\u00e9 }", "b"],"model":"e5", "dimensions":2 ,"x":[1,{"model":"y"}] }'
MIXED: Final[dict[str, Any]] = {"num_decode": 3, "models": [LLAMA, E5, LLAMA, E5]}
"""A pair, and two engines of a pooling model beside it, one of which is named first."""
BINARY: Final = bytes(range(256)) * 400 + b'"finish_reason":"abort"'


async def ask(rig: Rig, body: object = RAW, path: str = EMBEDDINGS, headers: dict[str, str] | None = None) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await (await rig.client()).post(path, body, headers)


async def begin(rig: Rig, body: bytes = RAW, headers: dict[str, str] | None = None) -> RawClient:
    client = await rig.client()
    await client.send(request_bytes(EMBEDDINGS, body, headers))
    return client


def counts(rig: Rig) -> list[int]:
    """How many requests each decode engine got."""
    return [len(engine.seen) for engine in rig.decodes]


# Whole and as it is.


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_goes_to_one_engine_byte_for_byte_and_so_does_its_answer(path: str, tmp_path: Path) -> None:
    async with running_rig(**MIXED, trace_file=tmp_path / "trace") as rig:
        got = await ask(rig, path=f"{path}?a=b", headers={"x-request-id": "R-7", "x-mine": "kept"})
        (asked,) = [*rig.decodes[0].seen, *rig.decodes[2].seen]
        assert (got.status, got.is_whole, got.body) == (200, True, rig.decode.answer(asked))
        assert (asked.message.path, asked.message.body) == (path, RAW)
        assert (asked.message.headers["x-request-id"], got.headers["x-request-id"]) == ("R-7", "R-7")
        assert asked.message.headers["x-mine"] == "kept"
        assert (orders(rig), counts(rig)[1]) == ([], 0)
        assert await rig.metric('pdcluster_router_requests_total{outcome="ok"}') == 1
        assert await rig.failures() == {}
    told = json.loads((tmp_path / "trace").read_text())
    assert (told["status"], told["request_id"], told["prefill_sent_at"]) == (200, "R-7", None)


async def test_the_head_of_an_answer_and_its_binary_body_pass_in_pieces() -> None:
    head = STREAM_HEAD.replace(b"text/event-stream; charset=utf-8", b"application/octet-stream\r\nmetadata: [1]")
    pieces = [BINARY[at : at + 10_000] for at in range(0, len(BINARY), 10_000)]
    async with running_rig() as rig:
        rig.decode.fault, rig.decode.raw = Fault.RAW, head + b"".join(map(chunk, pieces)) + END
        got = await ask(rig, {"input": "a", "encoding_format": "bytes"})
        assert (got.status, got.is_whole, got.body) == (200, True, BINARY)
        assert (got.headers["content-type"], got.headers["metadata"]) == ("application/octet-stream", "[1]")


async def test_an_alias_reaches_the_engine_as_its_model() -> None:
    async with running_rig(**MIXED, model_aliases=["fast=e5"]) as rig:
        raw = RAW.replace(b'"e5"', b'"fast"')
        assert (await ask(rig, raw)).status == 200
        (asked,) = [*rig.decodes[0].seen, *rig.decodes[2].seen]
        assert asked.message.body == raw[:-1] + b',"model":"e5"}'


# Which engines.


async def test_a_model_without_prefill_engines_is_served_here_and_a_chat_with_it_is_one_error() -> None:
    async with running_rig(**MIXED) as rig:
        for _ in range(4):
            assert (await ask(rig)).status == 200
        assert counts(rig)[1] == 0
        before = counts(rig)
        chat = {"model": "e5", "messages": [{"role": "user", "content": "a"}]}
        answer = await (await rig.client()).post(CHAT, chat)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_decode_engine")
        assert counts(rig) == before


async def test_an_engine_of_a_revision_without_prefill_engines_is_found_and_served(tmp_path: Path) -> None:
    async with running_file_rig(tmp_path / "engines", pairs=2) as rig:
        rig.decodes[1].models = E5
        pair = f"prefill {rig.prefill.url}\ndecode {rig.decode.url}\n"
        rig.write(f"{pair}decode {rig.decodes[1].url} revision=embeds-1\n")
        await until(lambda: sum(engine.is_healthy for engine in rig.router.services.all_engines()) == 3)
        assert (await ask(rig)).status == 200
        assert (await post(rig)).status == 200
        assert [[seen.message.path for seen in engine.seen] for engine in rig.decodes] == [
            ["/v1/completions"],
            [EMBEDDINGS],
        ]


async def test_an_engine_without_a_list_of_models_gets_neither_requests_nor_questions_of_a_pooling_model(
    tmp_path: Path,
) -> None:
    async with running_file_rig(tmp_path / "engines", pairs=3) as rig:
        told, silent = rig.decodes[1:]
        told.models, silent.models_status = E5, 404
        pair = f"prefill {rig.prefill.url}\ndecode {rig.decode.url}\n"
        rig.write(f"{pair}decode {told.url} revision=e\ndecode {silent.url} revision=new\n")
        engines = rig.router.services.engines[Role.DECODE]
        await until(lambda: [one.is_healthy and one.listing is not None for one in engines] == [True, True, False])
        await until(lambda: engines[2].is_healthy)
        for _ in range(10):
            assert (await ask(rig)).status == 200
        assert counts(rig) == [0, 10, 0]
        for path in ("/tokenize", "/detokenize"):
            asked = (await ask(rig, {"model": "e5", "prompt": "a", "tokens": [1]}, path)).json()
            assert f"http://{asked['headers']['host']}" == told.url


async def test_a_request_that_names_no_model_goes_to_engines_of_its_kind() -> None:
    async with running_rig(**MIXED) as rig:
        for _ in range(4):
            assert (await ask(rig, {"input": "a"})).status == 200
            assert (await post(rig, {"prompt": "a"})).status == 200
        assert (counts(rig)[1], counts(rig)[0] + counts(rig)[2]) == (4, 4)


async def test_a_model_that_no_engine_lists_is_vllms_own_404() -> None:
    async with running_rig(**MIXED) as rig:
        answer = await ask(rig, {"model": "mistral", "input": "a"})
        assert (answer.status, answer.json()["error"]["type"]) == (404, "NotFoundError")
        assert counts(rig) == [0, 0, 0]


async def test_a_model_that_no_engine_lists_may_be_asked_for_all_the_same() -> None:
    async with running_rig(**MIXED, unknown_models="ask") as rig:
        assert (await ask(rig, {"model": "mistral", "input": "a"})).status == 200
        assert (sum(counts(rig)), orders(rig)) == (1, [])


async def test_the_list_of_models_has_those_of_both_kinds() -> None:
    async with running_rig(**MIXED) as rig:
        listed = (await (await rig.client()).get("/v1/models")).json()["data"]
        assert {model["id"] for model in listed} == {"llama", "e5"}


async def test_an_engine_that_lacks_the_path_is_not_to_blame() -> None:
    async with running_rig(models=[LLAMA, LLAMA]) as rig:
        rig.decode.fault, rig.decode.raw = Fault.RAW, json_answer(404, b'{"detail":"Not Found"}')
        for _ in range(2 * NUM_IN_A_ROW):
            answer = await ask(rig, {"model": "llama", "input": "a"})
            assert (answer.status, answer.json()["error"]["code"]) == (404, "engine_error")
            assert "Not Found" in answer.json()["error"]["message"]
        (engine,) = rig.router.services.engines[Role.DECODE]
        assert (engine.breaker.circuit, await rig.failures()) == (Circuit.CLOSED, {})
        assert await rig.metric('pdcluster_router_requests_total{outcome="engine_error"}') == 2 * NUM_IN_A_ROW


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_of_a_pair_keeps_its_load_though_it_lacks_the_path(path: str) -> None:
    async with running_rig() as rig:
        (engine,) = rig.router.services.engines[Role.DECODE]
        before = engine.load.tokens(now=rig.router.services.now())
        rig.decode.fault, rig.decode.raw = Fault.RAW, json_answer(404, b'{"detail":"Not Found"}')
        assert (await ask(rig, {"input": "a" * 400_000}, path)).status == 404
        assert engine.load.tokens(now=rig.router.services.now()) == before


# What goes wrong.


@pytest.mark.parametrize("num_texts", [1400, 20_000], ids=["some more", "many more"])
async def test_an_answer_with_too_many_bytes_of_headers_is_one_error_and_nobodys_fault(num_texts: int) -> None:
    metadata = b"metadata: [%b]" % (b'{"index":0,"embed_dtype":"float32","shape":[1024]},' * num_texts)
    whole = answer(200, "application/octet-stream", b"x").replace(b"\r\n\r\n", b"\r\n" + metadata + b"\r\n\r\n", 1)
    async with running_rig(**MIXED) as rig:
        for engine in rig.decodes:
            engine.fault, engine.raw = Fault.RAW, whole
        for _ in range(2 * NUM_IN_A_ROW):
            got = await ask(rig)
            assert (got.status, got.json()["error"]["code"]) == (502, "answer_head_too_large")
            assert "65536 bytes of headers" in got.json()["error"]["message"]
            assert "encoding_format float or base64" in got.json()["error"]["message"]
        assert sum(counts(rig)) == 2 * NUM_IN_A_ROW, "no other engine is asked"
        assert {one.breaker.circuit for one in rig.router.services.engines[Role.DECODE]} == {Circuit.CLOSED}
        assert await rig.metric('pdcluster_router_requests_total{outcome="engine_error"}') == 2 * NUM_IN_A_ROW


async def test_such_an_answer_to_a_chat_is_a_fault_of_its_engine() -> None:
    """No client shapes the head of a chat's answer."""
    whole = answer(200, "application/json", b"{}").replace(b"\r\n\r\n", b"\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 1)
    async with running_rig(num_decode=2) as rig:
        for engine in rig.decodes:
            engine.fault, engine.raw = Fault.RAW, whole
        got = await (await rig.client()).post(CHAT, {"messages": [{"role": "user", "content": "a"}]})
        assert (got.status, got.json()["error"]["code"]) == (502, "decode_lost")
        assert counts(rig) == [1, 1]


@pytest.mark.parametrize("fault", [Fault.DIE, Fault.ERROR_500, Fault.ERROR_503, Fault.EMPTY_200, Fault.NOT_HTTP])
async def test_another_engine_of_the_model_answers_before_the_first_byte(fault: Fault) -> None:
    async with running_rig(**MIXED) as rig:
        rig.decodes[0].faults_to_come = rig.decodes[2].faults_to_come = [fault]  # One list: it comes once.
        got = await ask(rig)
        assert (got.status, got.is_whole, counts(rig)) == (200, True, [1, 0, 1])


async def test_an_engine_that_fails_again_and_again_is_ejected_and_no_other_one() -> None:
    async with running_rig(num_decode=2, models=[LLAMA, LLAMA, E5], max_decode_attempts=1) as rig:
        rig.decodes[1].fault = Fault.DIE
        for _ in range(NUM_IN_A_ROW):
            assert (await ask(rig)).status == 502
        circuits = [engine.breaker.circuit for engine in rig.router.services.engines[Role.DECODE]]
        assert circuits == [Circuit.CLOSED, Circuit.EJECTED]
        assert (await post(rig, {"model": "llama", "prompt": "a"})).status == 200


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_an_answer_that_is_cut_short_does_not_end_well(*, is_chunked: bool) -> None:
    async with running_rig() as rig:
        head = STREAM_HEAD.replace(b"text/event-stream; charset=utf-8", b"application/json")
        whole = answer(200, "application/json", b"x" * 300_000)
        rig.decode.fault, rig.decode.raw = Fault.RAW, head + chunk(b"x" * 1000) if is_chunked else whole[:-1]
        client = await begin(rig, b'{"input":"a"}')
        (engine,) = rig.router.services.engines[Role.DECODE]
        await until(lambda: engine.num_taken_up == 1)  # Its first bytes have gone to the client.
        rig.decode.hang_up_on_all()
        async with asyncio.timeout(PATIENCE_S):
            got = await client.receive()
        assert (got.status, got.is_whole) == (200, False)
        assert await rig.failures() == {"decode_lost": 1}


async def test_a_client_that_leaves_is_told_to_its_engine(rig: Rig) -> None:
    rig.decode.close_gate(Gate.ANSWER)
    client = await begin(rig, b'{"input":"a"}')
    asked = await rig.decode.next_request()
    client.leave()
    async with asyncio.timeout(PATIENCE_S):
        await asked.ended.wait()
    assert asked.is_disconnected
    await until(lambda: not rig.router.services.running)
    assert await rig.failures() == {"client_gone": 1}


async def test_a_request_that_takes_too_long_is_one_error(rig: Rig) -> None:
    rig.decode.fault = Fault.HANG
    answer = await ask(rig, {"input": "a"}, headers={"x-request-timeout": "0.2"})
    assert (answer.status, answer.json()["error"]["code"]) == (504, "deadline_passed")


@pytest.mark.parametrize(("body", "status"), [(b"[]", 400), (b"x" * 2000, 413)])
async def test_a_body_that_is_bad_or_too_large_costs_no_engine_anything(body: bytes, status: int) -> None:
    async with running_rig(max_body_bytes=1024) as rig:
        answer = await ask(rig, body)
        assert (answer.status, counts(rig)) == (status, [0])


@pytest.mark.parametrize("path", PATHS)
async def test_its_paths_take_a_post_only(rig: Rig, path: str) -> None:
    answer = await (await rig.client()).get(path)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


# Keys, queues, loads, and what is told.


async def test_it_needs_a_key_and_counts_for_its_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(line(KEY, "team-a max_concurrent=1"))
    async with running_rig(api_key_file=file) as rig:
        assert (await ask(rig, {"input": "a"})).status == 401
        rig.decode.close_gate(Gate.ANSWER)
        first = await begin(rig, b'{"input":"a"}', bearer(KEY))
        await rig.decode.next_request()
        assert (await ask(rig, {"input": "a"}, headers=bearer(KEY))).status == 429
        rig.decode.open_gate(Gate.ANSWER)
        assert (await first.receive()).status == 200
        assert (await ask(rig, {"input": "a"}, headers=bearer(KEY))).status == 200


async def test_a_crowd_waits_for_room_on_its_own_engines_and_holds_up_no_other_model() -> None:
    async with running_rig(num_decode=2, models=[LLAMA, LLAMA, E5], max_prefill_backlog_tokens=4) as rig:
        rig.decodes[1].close_gate(Gate.ANSWER)
        crowd = [await begin(rig) for _ in range(6)]
        await until(lambda: len(rig.decodes[1].seen) + rig.router.services.num_queued == 6)
        assert rig.router.services.num_queued > 0
        assert (await post(rig, {"model": "llama", "prompt": "a"})).status == 200
        rig.decodes[1].open_gate(Gate.ANSWER)
        for client in crowd:
            assert (await client.receive()).status == 200


async def test_a_large_answer_changes_nothing_of_what_other_answers_are_expected_to_be(rig: Rig) -> None:
    expected = rig.router.services.answers.expected(None)
    rig.decode.padding = "x" * 1_000_000
    assert (await ask(rig, {"input": "a"})).status == 200
    assert rig.router.services.answers.expected(None) == expected
    assert (await post(rig)).status == 200
    assert rig.router.services.answers.expected(None) != expected


async def test_the_access_log_has_its_line(tmp_path: Path) -> None:
    log = Log(tmp_path / "access")
    async with logged_rig(log, **MIXED) as rig:
        got = await ask(rig, headers={"x-request-id": "R-7"})
    told = log.line
    assert some(told, "request_id", "path", "model", "status", "outcome") == ("R-7", EMBEDDINGS, "e5", 200, "ok")
    assert some(told, "is_stream", "is_local_prefill", "prefill_engine") == (False, True, "")
    assert some(told, "prompt_tokens", "output_tokens") == (PROMPT_TOKENS, 0)
    assert some(told, "bytes_in", "bytes_out") == (len(RAW), len(got.body))
