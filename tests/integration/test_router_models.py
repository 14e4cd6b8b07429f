"""Several models behind one router: who gets a request, and who is told that there is no such model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes.answers import QUESTIONS, models_answer
from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.router import CHAT, PROMPT, Rig, post, running_rig, send, until
from patience import EDGE_S
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.listing import MAX_MODELS
from pdcluster_router.engines import health

pytestmark = pytest.mark.anyio

LLAMA, QWEN = models_answer("llama", "gpt-4", sql="/adapters/sql"), models_answer("qwen")
OFTEN = EDGE_S / 1000
"""Seconds between probes, where a test waits for news of engines."""


def asking(model: object, **more: Any) -> dict[str, Any]:
    return {**PROMPT, "model": model, **more}


def counts(rig: Rig) -> list[int]:
    """How many requests each engine got, prefill engines first."""
    return [len(engine.seen) for engine in (*rig.prefills, *rig.decodes)]


async def read_again(rig: Rig) -> None:
    """Each engine was asked for its models once more."""
    engines = (*rig.prefills, *rig.decodes)
    before = [engine.num_lists for engine in engines]
    await until(lambda: all(engine.num_lists > num + 1 for engine, num in zip(engines, before, strict=True)))


@pytest.mark.parametrize(
    ("model", "who"),
    [("llama", [3, 0, 3, 0]), ("gpt-4", [3, 0, 3, 0]), ("sql", [3, 0, 3, 0]), ("qwen", [0, 3, 0, 3])],
)
async def test_a_request_goes_to_a_pair_that_serves_its_model(model: str, who: list[int]) -> None:
    async with running_rig(num_prefill=2, num_decode=2, models=[LLAMA, QWEN, LLAMA, QWEN]) as rig:
        for _ in range(3):
            assert (await post(rig, asking(model))).status == 200
        assert counts(rig) == who


async def seconds_of(rig: Rig, family: str) -> dict[str, float]:
    """How many times were counted in ``family``, by labels as they are written. The names of engines stand for URLs."""
    text = (await (await rig.internal()).get("/metrics")).body.decode()
    for engine in rig.router.services.all_engines():
        text = text.replace(f'"{engine.url}"', engine.name)
    found = re.findall(rf"^pdcluster_router_{family}_seconds_count{{(.*)}} (\d+)$", text, re.MULTILINE)
    return {labels: int(count) for labels, count in found}


ALSO_UNKNOWN: dict[str, Any] = {
    "num_prefill": 2,
    "num_decode": 2,
    "model_aliases": ["fast=llama"],
    "unknown_models": "ask",
}
"""Two pairs, an alias, and names that no engine lists."""


async def test_metrics_tell_the_first_byte_of_each_model_and_the_answers_of_each_engine() -> None:
    async with running_rig(**ALSO_UNKNOWN, models=[LLAMA, QWEN, LLAMA, QWEN], max_prefill_attempts=1) as rig:
        for said in ("llama", "fast", "sql", "qwen"):
            assert (await post(rig, asking(said))).status == 200
        assert (await post(rig, asking("qwen", n=2))).status == 200
        rig.prefills[0].fault, rig.decodes[0].fault = Fault.ERROR_500, Fault.RECOMPUTE
        assert (await post(rig, asking("llama"))).status == 200
        assert await seconds_of(rig, "model_first_byte") == {
            'model="llama"': 3,
            'model="sql"': 1,
            'model="qwen"': 2,
        }
        assert await seconds_of(rig, "engine_answer") == {
            'role="prefill",engine=prefill-0': 3,
            'role="prefill",engine=prefill-1': 3,
            'role="decode",engine=decode-0': 4,
            'role="decode",engine=decode-1': 3,
        }


@pytest.mark.parametrize("lists", [[LLAMA, LLAMA], [b"{}", b"[]"]], ids=["listed", "silent"])
async def test_a_name_that_no_engine_lists_has_no_seconds_of_its_own(lists: list[bytes]) -> None:
    async with running_rig(unknown_models="ask", models=lists) as rig:
        for name in ("made-up-1", "made-up-2", "x" * 5000):
            assert (await post(rig, asking(name))).status == 200
        assert await seconds_of(rig, "model_first_byte") == {'model=""': 3}


async def test_errors_are_no_answers_of_a_model_or_an_engine() -> None:
    async with running_rig(models=[LLAMA, LLAMA], max_decode_attempts=1) as rig:
        rig.decode.fault = Fault.ERROR_404
        assert (await post(rig, asking("llama"))).status == 404
        assert await seconds_of(rig, "model_first_byte") == {}
        counted = await seconds_of(rig, "engine_answer")
        assert counted['role="decode",engine=decode-0'] == 0


async def test_another_try_goes_to_another_engine_of_the_model() -> None:
    async with running_rig(
        num_prefill=3, num_decode=3, models=[LLAMA, QWEN, LLAMA, LLAMA, QWEN, LLAMA], max_prefill_attempts=5
    ) as rig:
        for engine in (rig.prefills[0], rig.decodes[0]):
            engine.fault = Fault.ERROR_500
        for _ in range(4):
            assert (await post(rig, asking("llama"))).status == 200
        assert not rig.prefills[1].seen
        assert not rig.decodes[1].seen


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
async def test_a_model_that_nobody_serves_gets_vllms_own_404_and_no_engine_is_asked(path: str) -> None:
    async with running_rig(num_prefill=2, num_decode=2, models=[LLAMA, QWEN, LLAMA, QWEN]) as rig:
        answer = await (await rig.client()).post(path, asking("mistral"))
        assert (answer.status, answer.json()) == (404, {"error": not_found("mistral", "llama, gpt-4, qwen")})
        assert counts(rig) == [0, 0, 0, 0]


def not_found(name: str, served: str) -> dict[str, object]:
    """vLLM 0.32, ``serve/engine/serving.py``; ``test_anthropic_sdk.py`` compares it with an engine's own."""
    message = f"The model `{name}` does not exist. Valid aliases: {served}."
    return {"message": message, "type": "NotFoundError", "param": "model", "code": 404}


async def test_a_pool_of_one_model_refuses_others_too_and_messages_in_their_own_shape() -> None:
    async with running_rig() as rig:
        assert (await post(rig, asking("M"))).json()["error"] == not_found("M", "m")
        asked = {"model": "M", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
        answer = await (await rig.client()).post("/v1/messages", asked)
        told = {"type": "NotFoundError", "message": not_found("M", "m")["message"]}
        assert (answer.status, answer.json()) == (404, {"type": "error", "error": told})
        assert (await post(rig, asking("M", stream=True))).status == 404
        assert counts(rig) == [0, 0]


@pytest.mark.parametrize("body", [{"prompt": "a"}, asking(None), asking(""), asking("\u006d")])
async def test_a_request_without_a_model_is_for_the_one_there_is(body: dict[str, Any]) -> None:
    async with running_rig() as rig:
        assert (await post(rig, body)).status == 200
        assert counts(rig) == [1, 1]


@pytest.mark.parametrize("raw", [b"{}", b'{"model":null}', b'{"model":""}', b'{"model":5}', b'{"model":["qwen"]}'])
async def test_a_request_without_a_model_goes_to_one_pair_of_several_models(raw: bytes) -> None:
    async with running_rig(num_prefill=2, num_decode=2, models=[LLAMA, QWEN, QWEN, LLAMA]) as rig:
        for _ in range(2):
            client = await rig.client()
            await client.send(request_bytes("/v1/completions", raw))
            assert (await client.receive()).status == 200
        assert counts(rig) == [0, 2, 2, 0], "the first decode engine's model"


@pytest.mark.parametrize("name", [b'"llam\\u0061"', b'"\\u006clama"'])
async def test_a_name_may_be_written_in_any_way(name: bytes) -> None:
    async with running_rig(num_prefill=2, num_decode=2, models=[LLAMA, QWEN, LLAMA, QWEN]) as rig:
        client = await rig.client()
        await client.send(request_bytes("/v1/completions", b'{"model":"qwen","prompt":"a","\\u006dodel":%b}' % name))
        assert (await client.receive()).status == 200
        assert counts(rig) == [1, 0, 1, 0]


async def test_an_adapter_from_two_places_is_never_mixed() -> None:
    old, new = models_answer("m", sql="/sql-1"), models_answer("m", sql="/sql-2")
    async with running_rig(num_prefill=2, num_decode=2, models=[old, new, new, new]) as rig:
        for _ in range(4):
            assert (await post(rig, asking("sql"))).status == 200
        assert not rig.prefills[0].seen
        assert (await post(rig, asking("m"))).status == 200


async def test_an_adapter_that_only_decode_engines_have_is_prefilled_there() -> None:
    models = [models_answer("m"), models_answer("m", sql="/sql"), models_answer("m")]
    async with running_rig(num_decode=2, models=models) as rig:
        for body in (asking("sql"), asking("sql", n=2), asking("sql", stream=True)):
            assert (await post(rig, body)).status == 200
        assert counts(rig) == [0, 3, 0]


@pytest.mark.parametrize("roles", [{"num_prefill": 2}, {"num_decode": 2}])
async def test_a_base_model_that_one_role_alone_has_is_not_there_yet(roles: dict[str, int]) -> None:
    async with running_rig(**roles, models=[models_answer("m"), QWEN, models_answer("m")]) as rig:
        answer = await post(rig, asking("qwen"))
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_decode_engine")
        assert counts(rig) == [0, 0, 0]


async def test_the_list_of_models_has_those_of_all_engines_as_they_wrote_them() -> None:
    async with running_rig(num_prefill=2, num_decode=3, models=[LLAMA, QWEN, LLAMA, QWEN, LLAMA]) as rig:
        client = await rig.client()
        answer = await client.get("/v1/models")
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == {"object": "list", "data": json.loads(LLAMA)["data"] + json.loads(QWEN)["data"]}
        before = [engine.num_lists for engine in rig.decodes]
        assert (await client.get("/v1/models")).body == answer.body
        assert [engine.num_lists for engine in rig.decodes] == before, "it is remembered for some seconds"


async def test_a_list_that_cannot_be_read_leaves_the_others() -> None:
    async with running_rig(num_prefill=2, num_decode=2, models=[LLAMA, QWEN, LLAMA, QWEN]) as rig:
        rig.decodes[0].models_status = 401
        assert (await (await rig.client()).get("/v1/models")).json()["data"] == json.loads(QWEN)["data"]
        rig.decodes[1].models_status = 401
        client = await rig.client()
        await client.send(request_bytes("/v1/models", b"", {"authorization": "another"}, method="GET"))
        assert (await client.receive()).status == 401


@pytest.mark.parametrize("path", QUESTIONS)
async def test_a_question_goes_to_an_engine_of_its_model(path: str) -> None:
    async with running_rig(num_prefill=2, num_decode=2, models=[LLAMA, QWEN, LLAMA, QWEN]) as rig:
        for model in ("qwen", "qwen", "sql", None):
            await (await rig.client()).post(path, {"model": model, "prompt": "a"})
        assert [engine.num_questions for engine in rig.decodes] == [2, 2]
        answer = await (await rig.client()).post(path, {"model": "x", "prompt": "a"})
        assert answer.status == 404
        assert (await (await rig.client()).post(path, [])).status != 404
        assert [engine.num_questions for engine in rig.decodes] == [3, 2]


async def test_an_engine_that_does_not_say_what_it_serves_gets_requests_as_ever() -> None:
    async with running_rig(models=[b"{}", b"[]"]) as rig:
        assert (await post(rig, asking("anything"))).status == 200
        assert counts(rig) == [1, 1]


SQL, OTHER_SQL = models_answer("m", sql="/sql-1"), models_answer("m", sql="/sql-2")


@pytest.mark.parametrize("name", ["sql", "db"])
async def test_a_request_in_the_queue_gets_an_engine_on_which_its_name_is_still_what_it_was(name: str) -> None:
    async with waiting_for(name) as (rig, asked):
        rig.decodes[0].models = OTHER_SQL
        await lists_changed(rig)
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await asked.receive()).status == 200
        assert [one.body["model"] for one in rig.decodes[1].seen if one.body["model"] != "m"] == ["sql"]
        assert {one.body["model"] for one in rig.decodes[0].seen} <= {"m"}
        assert [one.body["model"] for one in rig.prefill.seen] == ["m", "sql"]


async def test_a_request_in_the_queue_whose_adapter_goes_gets_an_error_and_nothing_is_left() -> None:
    async with waiting_for("sql") as (rig, asked):
        for engine in (rig.prefill, *rig.decodes):
            engine.models = models_answer("m")
        await lists_changed(rig)
        rig.prefill.open_gate(Gate.PREFILL)
        answer = await asked.receive()
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_decode_engine")
        assert "sql" not in {one.body["model"] for one in rig.prefill.seen}
        await rig.settled()


@asynccontextmanager
async def waiting_for(name: str) -> AsyncIterator[tuple[Rig, RawClient]]:
    """A request for this model waits in the queue behind another one, which prefill has."""
    limits: dict[str, Any] = {"max_prefill_backlog_tokens": 1, "probe_interval_s": OFTEN, "model_aliases": ["db=sql"]}
    async with running_rig(num_decode=2, models=[SQL] * 3, **limits) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        await send(rig)
        await rig.prefill.next_request()
        asked = await send(rig, asking(name))
        await until(lambda: rig.router.services.num_queued == 1)
        yield rig, asked


async def lists_changed(rig: Rig) -> None:
    """The router has read the engines' lists anew, while a request was in its queue."""
    before = [engine.listing for engine in rig.router.services.all_engines()]
    assert (await post(rig, asking("unknown"))).status == 404
    await read_again(rig)
    assert [engine.listing for engine in rig.router.services.all_engines()] != before
    assert rig.router.services.num_queued == 1


async def test_an_engine_that_lists_too_many_models_keeps_the_first_ones_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with running_rig(probe_interval_s=OFTEN) as rig:
        for engine in (rig.prefill, rig.decode):
            engine.models = models_answer("m", **{f"a{number}": f"/a/{number}" for number in range(MAX_MODELS)})
        for _ in range(2):
            assert (await post(rig, asking("unknown"))).status == 404
            await read_again(rig)
        assert (await post(rig, asking(f"a{MAX_MODELS - 2}"))).status == 200
        assert (await post(rig, asking(f"a{MAX_MODELS - 1}"))).status == 404
    told = sorted(record.getMessage() for record in caplog.records)
    assert [line.partition(" reason=")[0] for line in told] == [
        f"engine lists too many models engine={name}" for name in ("decode-0", "prefill-0")
    ]


def set_numbers_of_probes(monkeypatch: pytest.MonkeyPatch, for_list: int, for_unknown: int) -> None:
    """After how many probes an engine is asked for its models: as usual, and when an unknown one was asked for."""
    monkeypatch.setattr(health, "PROBES_FOR_LIST", for_list)
    monkeypatch.setattr(health, "PROBES_FOR_UNKNOWN", for_unknown)


async def test_an_adapter_that_is_loaded_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = health.PROBES_FOR_LIST, health.PROBES_FOR_UNKNOWN
    set_numbers_of_probes(monkeypatch, 10**9, 10**9)
    async with running_rig(probe_interval_s=OFTEN) as rig:
        assert (await post(rig, asking("sql"))).status == 404
        for engine in (rig.prefill, rig.decode):
            engine.models = models_answer("m", sql="/sql")
        assert (await post(rig, asking("sql"))).status == 404
        set_numbers_of_probes(monkeypatch, *usual)
        await read_again(rig)
        assert (await post(rig, asking("sql"))).status == 200


async def test_an_engine_that_was_well_keeps_its_models_while_it_does_not_tell_them() -> None:
    async with running_rig(probe_interval_s=OFTEN) as rig:
        rig.decode.models_status = 500
        assert (await post(rig, asking("x"))).status == 404
        await read_again(rig)
        assert (await post(rig, asking("x"))).status == 404
        assert (await post(rig)).status == 200


async def test_an_engine_that_did_not_tell_its_models_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBES_FOR_LIST", 10**9)
    async with running_rig(probe_interval_s=OFTEN, models=[b"not yet"]) as rig:
        (prefill,) = rig.router.services.engines[Role.PREFILL]
        assert prefill.listing is None
        rig.prefill.models = models_answer("m")
        await until(lambda: prefill.listing is not None)


async def test_another_life_of_an_engine_is_asked_anew() -> None:
    both = models_answer("m", "other")
    async with running_rig(probe_interval_s=OFTEN, models=[both]) as rig:
        rig.decode.health_status = 503
        (decode,) = rig.router.services.engines[Role.DECODE]
        await until(lambda: not decode.is_healthy)
        rig.decode.models = both
        rig.decode.health_status = 200
        await until(lambda: decode.is_healthy)
        assert (await post(rig, asking("other"))).status == 200


async def test_engines_are_asked_with_their_key() -> None:
    async with running_rig(engine_api_key="sk-engine") as rig:
        assert rig.decode.list_headers["authorization"] == "Bearer sk-engine"


async def test_the_access_log_names_the_model_of_a_request_that_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with running_rig(access_log=log) as rig:
        assert (await post(rig, asking("mistral"))).status == 404
    (line,) = map(json.loads, log.read_text().splitlines())
    assert (line["model"], line["status"]) == ("mistral", 404)


async def test_a_router_may_be_told_to_ask_engines_for_models_that_none_of_them_lists() -> None:
    async with running_rig(unknown_models="ask") as rig:
        assert (await post(rig, asking("from-a-resolver"))).status == 200
        assert counts(rig) == [1, 1]
    async with running_rig(num_prefill=2, num_decode=2, models=[LLAMA, QWEN, LLAMA, QWEN], unknown_models="ask") as rig:
        assert (await (await rig.client()).post("/tokenize", asking("from-a-resolver"))).status == 200


async def test_a_long_name_is_not_told_whole() -> None:
    async with running_rig() as rig:
        answer: Message = await post(rig, asking("x" * 100_000))
        assert answer.status == 404
        assert len(answer.body) < 500
