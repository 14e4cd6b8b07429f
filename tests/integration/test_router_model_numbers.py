"""The tokens of each model, and what a token takes: which answers count, and as what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes.access_log import TALK, ask
from fakes.answers import models_answer
from fakes.faults import Fault, Gate
from fakes.http import request_bytes
from fakes.messages import MESSAGES
from fakes.reservations import CACHED_TOKENS, PROMPT_TOKENS
from fakes.responses import RESPONSES
from fakes.router import CHAT, COMPLETIONS, PROMPT, STREAM, Rig, post, running_rig, send, until
from integration.test_router_models import ALSO_UNKNOWN

pytestmark = pytest.mark.anyio

NUM_ANSWER: Final = 4
WITH_USAGE: Final[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
ITEMS: Final[dict[str, Any]] = {"model": "m", "input": TALK["messages"]}
TWO: Final[dict[str, Any]] = {"model": "m", "messages": TALK["messages"], "n": 2}
LLAMA, QWEN = models_answer("llama", sql="/adapters/sql"), models_answer("qwen")

PROMPT_ONLY: Final = {"prompt_tokens": (1, PROMPT_TOKENS), "cached_tokens": (1, CACHED_TOKENS)}
ALL: Final = {**PROMPT_ONLY, "answer_tokens": (1, NUM_ANSWER)}
Numbers = dict[str, dict[str, tuple[float, float]]]


async def numbers_in(rig: Rig) -> Numbers:
    """By model and family: how many answers, and the sum; only families with any."""
    page = (await (await rig.internal()).get("/metrics")).body.decode()
    found: dict[tuple[str, str], dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        name = family.name.removeprefix("pdcluster_router_model_")
        if name != family.name and family.type == "histogram":
            for one in family.samples:
                found.setdefault((one.labels["model"], name), {})[one.name.rpartition("_")[2]] = one.value
    numbers: Numbers = {}
    for (model, name), said in found.items():
        if said["count"]:
            numbers.setdefault(model, {})[name] = (said["count"], said["sum"])
    return numbers


async def tokens_in(rig: Rig, model: str = "m") -> dict[str, tuple[float, float]]:
    """The families of ``model`` that count tokens."""
    numbers = (await numbers_in(rig)).get(model, {})
    return {name: said for name, said in numbers.items() if name.endswith("_tokens")}


@pytest.mark.parametrize(
    ("path", "body", "counted"),
    [
        pytest.param(COMPLETIONS, PROMPT, ALL, id="plain"),
        pytest.param(COMPLETIONS, {**PROMPT, **WITH_USAGE}, ALL, id="stream"),
        pytest.param(CHAT, {**TALK, **WITH_USAGE}, ALL, id="chat"),
        pytest.param(COMPLETIONS, STREAM, PROMPT_ONLY, id="stream without usage"),
        pytest.param(MESSAGES, TALK, ALL, id="messages"),
        pytest.param(MESSAGES, {**TALK, "stream": True}, ALL, id="stream of messages"),
        pytest.param(RESPONSES, ITEMS, ALL, id="responses"),
        pytest.param(RESPONSES, {**ITEMS, "stream": True}, ALL, id="stream of responses"),
        pytest.param(CHAT, TWO, {**ALL, "answer_tokens": (1, 2 * NUM_ANSWER)}, id="two choices"),
        pytest.param(CHAT, {**TWO, **WITH_USAGE}, {**ALL, "answer_tokens": (1, 2 * NUM_ANSWER)}, id="stream of two"),
        pytest.param(CHAT, {**TWO, "stream": True}, PROMPT_ONLY, id="stream of two without usage"),
        pytest.param(
            COMPLETIONS,
            {**PROMPT, "echo": True},
            {"prompt_tokens": (1, PROMPT_TOKENS), "answer_tokens": (1, NUM_ANSWER)},
            id="decode alone",
        ),
    ],
)
async def test_an_answer_counts_once_with_what_is_known_of_it(
    rig: Rig, path: str, body: dict[str, Any], counted: dict[str, tuple[int, int]]
) -> None:
    assert (await ask(rig, body, path)).status == 200
    await rig.settled()
    assert await tokens_in(rig) == counted


async def test_usage_counts_with_an_access_log_as_without(rig: Rig, tmp_path: Path) -> None:
    async with running_rig(access_log=tmp_path / "access") as logged:
        for one in (rig, logged):
            await ask(one, {**PROMPT, **WITH_USAGE})
        assert await tokens_in(logged) == await tokens_in(rig) == ALL


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {**PROMPT, **WITH_USAGE}),
        (MESSAGES, {**TALK, "stream": True}),
        (RESPONSES, {**ITEMS, "stream": True}),
    ],
)
async def test_a_token_after_the_first_one_takes_what_the_stream_takes(
    rig: Rig, path: str, body: dict[str, Any]
) -> None:
    rig.decode.token_s = 0.05
    await ask(rig, body, path)
    count, seconds = (await numbers_in(rig))["m"]["token_seconds"]
    assert count == 1
    assert seconds >= 0.9 * rig.decode.token_s


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, STREAM), (CHAT, {**TALK, "stream": True}), (MESSAGES, {**TALK, "stream": True})],
)
async def test_the_gaps_of_a_stream_count_while_it_runs(rig: Rig, path: str, body: dict[str, Any]) -> None:
    rig.decode.token_s = 0.05
    client = await rig.client()
    await client.send(request_bytes(path, json.dumps(body).encode()))
    models = rig.router.services.metrics.models.known
    await until(lambda: "m" in models and models["m"].gaps.total >= 0.05)
    assert len(rig.router.services.running) == 1
    assert (await client.receive()).is_whole
    count, seconds = (await numbers_in(rig))["m"]["gap_seconds"]
    assert count >= NUM_ANSWER - 1
    assert seconds >= 0.05 * (NUM_ANSWER - 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(COMPLETIONS, PROMPT, id="plain"),
        pytest.param(CHAT, {**TWO, "stream": True}, id="two choices"),
        pytest.param(COMPLETIONS, {**STREAM, "best_of": 3}, id="of three the best"),
    ],
)
async def test_an_answer_that_is_no_stream_of_one_sequence_has_no_gaps(
    rig: Rig, path: str, body: dict[str, Any]
) -> None:
    assert (await ask(rig, body, path)).status == 200
    assert "gap_seconds" not in (await numbers_in(rig))["m"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(COMPLETIONS, PROMPT, id="plain"),
        pytest.param(COMPLETIONS, STREAM, id="no usage"),
        pytest.param(CHAT, {**TWO, **WITH_USAGE}, id="two choices"),
        pytest.param(COMPLETIONS, {**PROMPT, **WITH_USAGE, "best_of": 3}, id="of three the best"),
    ],
)
async def test_an_answer_that_does_not_show_its_tokens_one_by_one_has_no_time_of_a_token(
    rig: Rig, path: str, body: dict[str, Any]
) -> None:
    assert (await ask(rig, body, path)).status == 200
    assert "token_seconds" not in (await numbers_in(rig))["m"]


@pytest.mark.parametrize(
    "fault", [Fault.ERROR_404, Fault.DIE, Fault.DIE_MID_STREAM, Fault.ERROR_MID_STREAM, Fault.GIVE_UP]
)
async def test_an_answer_that_fails_does_not_count(fault: Fault) -> None:
    async with running_rig(max_decode_attempts=1) as rig:
        rig.decode.fault = fault
        client = await send(rig, {**PROMPT, **WITH_USAGE})
        await until(lambda: sum(rig.router.services.metrics.num_ended.values()) == 1)
        numbers = await numbers_in(rig)
        assert numbers.keys() <= {"m"}
        assert numbers.get("m", {}).keys() <= {"gap_seconds"}
        client.leave()


@pytest.mark.parametrize("body", [STREAM, {**PROMPT, "prompt": ["a", "b"], **WITH_USAGE}], ids=["one", "parts"])
async def test_an_answer_whose_client_leaves_does_not_count(rig: Rig, body: dict[str, Any]) -> None:
    rig.decode.close_gate(Gate.SECOND_TOKEN)
    client = await send(rig, body)
    await client.reader.readuntil(b"data: ")
    client.leave()
    await until(lambda: sum(rig.router.services.metrics.num_ended.values()) == 1)
    assert await numbers_in(rig) == {}


async def test_each_model_has_numbers_of_its_own_and_a_made_up_name_has_none() -> None:
    async with running_rig(**ALSO_UNKNOWN, models=[LLAMA, QWEN, LLAMA, QWEN]) as rig:
        for model in ("llama", "fast", "sql", "qwen", "made-up-1", "made-up-2"):
            assert (await post(rig, {**PROMPT, "model": model})).status == 200
        counts = {model: one["answer_tokens"][0] for model, one in (await numbers_in(rig)).items()}
        assert counts == {"llama": 2, "sql": 1, "qwen": 1, "": 2}


async def test_a_second_try_counts_once() -> None:
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].faults_to_come = [Fault.DIE_WITH_KV]
        for _ in range(4):
            assert (await post(rig)).status == 200
        assert (await tokens_in(rig))["prompt_tokens"] == (4, 4 * PROMPT_TOKENS)
