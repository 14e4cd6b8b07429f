"""Questions that a decode engine answers by itself: what it is asked, and what comes back."""

from __future__ import annotations

import asyncio
import re
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fakes.answers import QUESTIONS
from fakes.faults import Fault
from fakes.http import Message, request_bytes
from fakes.router import Rig, running_rig, until
from patience import EDGE_S, PATIENCE_S
from pdcluster_router.front import pass_on
from pdcluster_router.front.pass_on import SMALL_BYTES
from pdcluster_router.services import Services

pytestmark = pytest.mark.anyio

BODY = b'{"model":"m",  "prompt":"a b", "big":123456789012345678901234567890}'


LARGE = b'{"prompt":"%b"}' % (b"x" * SMALL_BYTES)


async def ask(rig: Rig, path: str = "/tokenize", body: bytes = BODY, headers: dict[str, str] | None = None) -> Message:
    client = await rig.client()
    await client.send(request_bytes(path, body, headers or {}))
    return await asyncio.wait_for(client.receive(), PATIENCE_S)


def code_of(answer: Message) -> tuple[int, Any]:
    return answer.status, answer.json()["error"]["code"]


@pytest.mark.parametrize("path", QUESTIONS)
async def test_a_question_goes_to_a_decode_engine_byte_for_byte(rig: Rig, path: str) -> None:
    answer = await ask(rig, path, headers={"authorization": "Bearer k", "content-type": "application/json; x=1"})
    asked = answer.json()
    assert (asked["path"], asked["body"].encode()) == (path, BODY)
    assert asked["headers"]["authorization"] == "Bearer k"
    assert asked["headers"]["content-type"] == "application/json; x=1"
    assert not rig.prefill.seen
    await room_is_free(rig)


async def test_an_engines_refusal_is_the_answer(rig: Rig) -> None:
    answer = await ask(rig, "/detokenize")
    assert (answer.status, answer.json()["path"]) == (400, "/detokenize")


async def test_the_version_is_an_engines(rig: Rig) -> None:
    assert (await (await rig.client()).get("/version")).json() == {"version": "0.0"}


async def test_what_an_engine_answers_by_itself_takes_its_own_method(rig: Rig) -> None:
    assert code_of(await (await rig.client()).get("/tokenize")) == (405, "method_not_allowed")


async def test_an_engine_that_is_gone_is_no_clients_matter_while_another_one_answers() -> None:
    async with running_rig(num_decode=2) as rig:
        await rig.decodes[0].stop()
        assert (await ask(rig)).status == 200
        await rig.decodes[1].stop()
        assert code_of(await ask(rig)) == (503, "no_decode_engine")


@pytest.mark.parametrize(
    ("fault", "body", "num_asked", "says"),
    [
        (Fault.TOO_MUCH, BODY, 1, "the answer is larger than"),
        (Fault.HANG, LARGE, 1, "sent no answer within"),
        (Fault.HANG, BODY, 2, "sent no answer within"),
        (Fault.DIE, LARGE, 2, "decode-"),
    ],
)
async def test_a_question_that_engines_cannot_bear_is_not_carried_through_the_pool(
    fault: Fault, body: bytes, num_asked: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_on, "TIMEOUT_S", EDGE_S if fault is not Fault.HANG else 8.0)
    async with running_rig(num_decode=5) as rig:
        for engine in rig.decodes:
            engine.question_fault = fault
        answer = await ask(rig, body=body)
        assert code_of(answer) == (502, "no_answer")
        assert says in answer.json()["error"]["message"]
        assert sum(engine.num_questions for engine in rig.decodes) == num_asked
        assert rig.router.room.used_bytes == 0


async def test_a_timer_that_fires_before_the_clock_says_so_hands_no_large_question_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvloop counts from when its turn began: after a turn that took long, its timers fire early by so much."""
    monkeypatch.setattr(pass_on, "TIMEOUT_S", 8.0)
    monkeypatch.setattr(Services, "now", staticmethod(lambda: time.monotonic() / 2))
    async with running_rig(num_decode=3) as rig:
        for engine in rig.decodes:
            engine.question_fault = Fault.HANG
        assert code_of(await ask(rig, body=LARGE)) == (502, "no_answer")
        assert sum(engine.num_questions for engine in rig.decodes) == 1


async def test_a_small_question_does_not_wait_for_an_engine_that_is_busy_with_a_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pass_on, "TIMEOUT_S", 16.0)
    async with running_rig(num_decode=2) as rig:
        rig.decodes[0].question_fault = Fault.HANG
        assert (await ask(rig)).status == 200
        assert [engine.num_questions for engine in rig.decodes] == [1, 1]


async def test_the_only_engine_has_all_the_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_on, "TIMEOUT_S", 4.0)
    async with running_rig() as rig:
        rig.decode.question_fault = Fault.HANG
        answer = await ask(rig)
        assert code_of(answer) == (502, "no_answer")
        said = re.search(r"within ([\d.]+) s", answer.json()["error"]["message"])
        assert said is not None
        assert float(said[1]) > 2.4, "no half of it was kept for another engine"


async def test_engines_that_answer_no_connection_are_no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_on, "TIMEOUT_S", 0.0)
    async with running_rig(num_decode=2) as rig:
        assert code_of(await ask(rig)) == (503, "no_decode_engine")


async def test_however_many_engines_are_gone_a_question_finds_the_one_that_is_there() -> None:
    async with running_rig(num_decode=5) as rig:
        for engine in rig.decodes[:4]:
            await engine.stop()
        assert [(await ask(rig)).status for _ in range(3)] == [200] * 3


async def test_an_idle_connection_that_was_closed_costs_no_question(rig: Rig) -> None:
    for _ in range(3):
        assert (await ask(rig)).status == 200
        rig.decode.hang_up_on_all()


async def test_a_body_is_bounded() -> None:
    async with running_rig(max_body_bytes=1024) as rig:
        assert code_of(await ask(rig, body=b"x" * 1025)) == (413, "body_too_large")
        assert (await ask(rig, body=b'"' + b"x" * 1022 + b'"')).status == 200


async def test_a_body_takes_its_part_of_the_room() -> None:
    async with running_rig(max_buffered_bytes=1 << 20) as rig:
        assert code_of(await ask(rig, body=b"x" * (1 << 20))) == (503, "no_room")
        assert await rig.failures() == {"no_room": 1}
        await room_is_free(rig)  # The rest of the body is read and dropped when its client has the answer.
        assert (await ask(rig)).status == 200


async def test_an_answer_for_which_the_router_is_too_small_is_refused_with_both_sizes() -> None:
    async with running_rig(max_buffered_bytes=1 << 20) as rig:
        rig.decode.question_fault = Fault.MUCH
        refused = await ask(rig)
        assert code_of(refused) == (502, "answer_too_large")
        assert f"has {16 << 20} bytes, and the router has room for {1 << 19}: " in refused.json()["error"]["message"]


async def room_is_free(rig: Rig) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while rig.router.room.used_bytes:
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_with_half_a_question_leaves_nothing(rig: Rig) -> None:
    client = await rig.client()
    await client.send(request_bytes("/tokenize", BODY)[:-1])
    while not rig.router.room.used_bytes:
        await asyncio.sleep(0.01)
    client.leave()
    await room_is_free(rig)


async def test_a_router_that_ends_waits_for_a_question_that_an_engine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_on, "TIMEOUT_S", PATIENCE_S)
    async with running_rig() as rig:
        rig.decode.question_fault = Fault.HANG
        asking = asyncio.create_task(ask(rig))
        await until(lambda: rig.decode.num_questions == 1)
        rig.router.drain()
        ending = asyncio.create_task(rig.router.wait_until_idle(PATIENCE_S))
        await asyncio.sleep(0.2)
        assert not ending.done()
        rig.decode.question_fault = Fault.NONE
        rig.decode.hang_up_on_all()
        await ending
        assert (await asking).status in (200, 502)


async def test_a_lines_end_behind_the_path_reaches_no_engine(rig: Rig) -> None:
    answer = await ask(rig, "/tokenize%0A")
    assert (answer.status, answer.json()["path"]) == (200, "/tokenize")


async def test_a_router_that_drains_passes_nothing_on(rig: Rig) -> None:
    client = await rig.client()
    assert (await client.get("/health")).status == 200
    rig.router.drain()
    await client.send(request_bytes("/tokenize", BODY))
    assert code_of(await client.receive()) == (503, "draining")


async def test_a_question_needs_a_key_where_requests_do(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{sha256(b'sk-first').hexdigest()}  team-a\n")
    async with running_rig(api_key_file=file) as rig:
        assert code_of(await ask(rig)) == (401, "invalid_api_key")
        answer = await ask(rig, headers={"authorization": "Bearer sk-first"})
        assert answer.status == 200
        assert "authorization" not in answer.json()["headers"]
