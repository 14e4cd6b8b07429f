"""Aliases of models: what clients ask for, what engines get, and what everybody is told."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fakes.answers import QUESTIONS, models_answer
from fakes.http import request_bytes
from fakes.router import BOTH, CHAT, PROMPT, Rig, post, running_rig, until
from patience import EDGE_S
from pdcluster_protocol.errors import ConfigError

pytestmark = pytest.mark.anyio

LLAMA, QWEN = models_answer("llama", "gpt-4", sql="/adapters/sql"), models_answer("qwen")
ALIASES = ["fast=llama", "db=sql", "gone=mistral"]
OFTEN = EDGE_S / 1000
RAW = b'{ "prompt" : "\\u00e9 }", "model":"fast","n" : 1, "x":[1,{"model":"fast"}] }'


def asking(model: object, **more: Any) -> dict[str, Any]:
    return {**PROMPT, "model": model, **more}


def names_of(rig: Rig) -> list[set[str]]:
    """The models that prefill and decode engines were asked for, as Python's ``json`` reads their bodies."""
    return [
        {request.body["model"] for one in engines for request in one.seen} for engines in (rig.prefills, rig.decodes)
    ]


@pytest.mark.parametrize(("alias", "model"), [("fast", "llama"), ("db", "sql")])
async def test_engines_of_the_model_get_its_own_name(alias: str, model: str) -> None:
    async with running_rig(
        num_prefill=2, num_decode=2, models=[QWEN, LLAMA, QWEN, LLAMA], model_aliases=ALIASES
    ) as rig:
        for more in ({}, {"stream": True}, {"n": 2}, {"prompt": ["a", "b"]}):
            assert (await post(rig, asking(alias, **more))).status == 200
        chat = {"model": alias, "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
        for path in (CHAT, "/v1/messages"):
            assert (await (await rig.client()).post(path, chat)).status == 200
        assert names_of(rig) == [{model}, {model}]
        assert not rig.prefills[0].seen
        assert not rig.decodes[0].seen


async def test_all_other_bytes_of_the_client_reach_engines_as_they_are() -> None:
    async with running_rig(models=[LLAMA, LLAMA], model_aliases=ALIASES) as rig:
        client = await rig.client()
        await client.send(request_bytes("/v1/completions", RAW))
        assert (await client.receive()).status == 200
        for engine in (rig.prefill, rig.decode):
            raw = engine.seen[0].message.body
            assert raw.startswith(RAW[:-1] + b',"model":"llama",')


async def test_the_answer_is_the_engines_own() -> None:
    async with running_rig(models=[LLAMA, LLAMA], model_aliases=ALIASES) as rig:
        assert (await post(rig, asking("fast"))).body == (await post(rig, asking("llama"))).body


@BOTH
async def test_an_alias_of_a_model_that_no_engine_serves_gets_one_404_that_hides_the_model(
    body: dict[str, Any],
) -> None:
    async with running_rig(models=[LLAMA, LLAMA], model_aliases=ALIASES) as rig:
        answer = await post(rig, {**body, "model": "gone"})
        assert (answer.status, answer.json()["error"]["param"]) == (404, "model")
        assert answer.json()["error"]["message"] == (
            "The model `gone` is an alias here (--model-alias) of a model that no engine serves. "
            "Valid aliases: llama, gpt-4, fast, db."
        )
        told = await (await rig.client()).post("/v1/messages", {"model": "gone", "max_tokens": 1, "messages": []})
        assert (told.status, told.json()["error"]["message"]) == (404, answer.json()["error"]["message"])
        assert not rig.decode.seen


async def test_a_router_that_asks_for_unknown_models_asks_by_the_models_own_name() -> None:
    async with running_rig(model_aliases=ALIASES, unknown_models="ask") as rig:
        assert (await post(rig, asking("gone"))).status == 200
        assert names_of(rig) == [{"mistral"}, {"mistral"}]


async def test_the_list_of_models_has_aliases_of_models_that_are_there() -> None:
    async with running_rig(models=[LLAMA, LLAMA], model_aliases=ALIASES) as rig:
        client = await rig.client()
        listed = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["llama", "gpt-4", "sql", "fast", "db"]
        assert listed[4] == {**listed[2], "id": "db"}
    async with running_rig(num_prefill=2, num_decode=2, models=[LLAMA, QWEN] * 2, model_aliases=ALIASES) as rig:
        listed = (await (await rig.client()).get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["llama", "gpt-4", "sql", "qwen", "fast", "db"]
        rig.decodes[0].models_status = rig.decodes[1].models_status = 401
        client = await rig.client()
        await client.send(request_bytes("/v1/models", b"", {"authorization": "another"}, method="GET"))
        assert (await client.receive()).status == 401


@pytest.mark.parametrize("path", QUESTIONS)
@pytest.mark.parametrize("models", [[LLAMA, LLAMA], [LLAMA, QWEN]], ids=["one model", "several"])
async def test_a_question_about_an_alias_is_asked_by_the_models_own_name(path: str, models: list[bytes]) -> None:
    async with running_rig(num_prefill=2, num_decode=2, models=[*models] * 2, model_aliases=ALIASES) as rig:
        client = await rig.client()
        await client.send(request_bytes(path, RAW))
        answer = await client.receive()
        if answer.status == 200:
            assert answer.json()["body"] == (RAW[:-1] + b',"model":"llama"}').decode()
        assert rig.decodes[1].num_questions == 0 or models[1] == LLAMA
        assert (await (await rig.client()).post(path, {"model": "gone", "prompt": "a"})).status == 404
        before = await (await rig.client()).post(path, {"model": "llama", "prompt": "a"})
        assert '"model":"llama"' not in before.body.decode().replace("\\", "").partition("prompt")[2]


async def test_why_status_and_access_log_tell_both_names(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with running_rig(models=[LLAMA, LLAMA], model_aliases=ALIASES, access_log=log) as rig:
        for alias in ("fast", "gone", "llama"):
            client = await rig.client()
            raw = json.dumps(asking(alias)).encode()
            await client.send(request_bytes("/v1/completions", raw, {"x-request-id": f"r-{alias}"}))
            await client.receive()
        internal = await rig.internal()
        (kept,) = (await internal.get("/pdcluster/requests?id=r-fast")).json()["requests"]
        assert (kept["model"], kept["alias_of"]) == ("fast", "llama")
        (kept,) = (await internal.get("/pdcluster/requests?id=r-llama")).json()["requests"]
        assert "alias_of" not in kept
        recent = (await internal.get("/pdcluster/status")).json()["recent"]
        assert {(one.get("model", ""), one.get("alias_of", "")) for one in recent} >= {("fast", "llama"), ("llama", "")}
    lines = {line["request_id"]: line for line in map(json.loads, log.read_text().splitlines())}
    told = {name: (line["model"], line["alias_of"]) for name, line in lines.items()}
    assert told == {"r-fast": ("fast", "llama"), "r-gone": ("gone", "mistral"), "r-llama": ("llama", "")}


async def test_a_router_does_not_start_with_an_alias_that_is_the_name_of_a_base_model() -> None:
    with pytest.raises(
        ConfigError, match=r"^--model-alias gpt-4=qwen: decode-0 \(http://.*\) serves a model gpt-4 itself: "
    ):
        async with running_rig(models=[QWEN, LLAMA], model_aliases=["gpt-4=qwen"]):
            pytest.fail("it has started")


async def test_an_adapter_that_is_loaded_under_an_aliass_name_is_hidden_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with running_rig(models=[LLAMA, LLAMA], model_aliases=["new=llama"], probe_interval_s=OFTEN) as rig:
        for engine in (rig.prefill, rig.decode):
            engine.models = models_answer("llama", new="/new")
        assert (await post(rig, asking("x"))).status == 404  # Lists are read again soon.
        await until(lambda: all(one.listing and one.listing.get("new") for one in rig.router.services.all_engines()))
        assert (await post(rig, asking("new"))).status == 200
        assert names_of(rig) == [{"llama"}, {"llama"}]
    told = [record.getMessage() for record in caplog.records if "alias hides a model" in record.getMessage()]
    assert len(told) == 1
    assert "alias=new alias_of=llama engine=" in told[0]
