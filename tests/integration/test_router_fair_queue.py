"""Keys take turns in the queue: one with hundreds of requests does not keep another one waiting for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from fakes.faults import Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.router import COMPLETIONS, Rig, running_rig, until
from integration.test_router_access import KEY, OTHER, bearer, line
from patience import PATIENCE_S
from pdcluster_protocol.labels import Role

pytestmark = pytest.mark.anyio

ONE: dict[str, Any] = {"max_prefill_backlog_tokens": 1}
"""One request at a time."""


def keys_in(folder: Path, greedy: str = "", modest: str = "") -> Path:
    """A file with two keys, and what stands behind their names."""
    file = folder / "keys"
    file.write_text(line(KEY, f"greedy {greedy}") + line(OTHER, f"modest {modest}"))
    return file


async def ask(rig: Rig, prompt: str, key: str) -> RawClient:
    client = await rig.client()
    body = json.dumps({"model": "m", "prompt": prompt, "priority": 7}).encode()
    await client.send(request_bytes(COMPLETIONS, body, bearer(key)))
    return client


async def answer_to(client: RawClient) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await client.receive()


async def occupied(rig: Rig, number: int) -> list[RawClient]:
    """The greedy key has one request that prefill works on, until its gate is opened, and ``number`` that wait."""
    rig.prefill.close_gate(Gate.PREFILL)
    clients = [await ask(rig, "greedy", KEY)]
    await rig.prefill.next_request()
    clients += [await ask(rig, "greedy", KEY) for _ in range(number)]
    await queued(rig, number)
    return clients


async def queued(rig: Rig, number: int) -> None:
    await until(lambda: rig.router.services.num_queued == number)


def prompts(rig: Rig) -> list[str]:
    """In the order in which requests were admitted."""
    return [str(seen.body["prompt"]) for seen in rig.decode.seen]


async def test_a_key_that_asks_one_by_one_waits_for_one_request_of_a_key_with_hundreds(tmp_path: Path) -> None:
    async with running_rig(**ONE, api_key_file=keys_in(tmp_path)) as rig:
        greedy = await occupied(rig, 300)
        for number in range(5):
            modest = await ask(rig, f"modest {number}", OTHER)
            await until(lambda: "modest" in clients_that_wait(rig))
            num_before = len(rig.decode.seen)
            rig.prefill.open_gate(Gate.PREFILL)
            assert (await answer_to(modest)).status == 200
            assert prompts(rig).index(f"modest {number}") <= num_before + 1
            rig.prefill.close_gate(Gate.PREFILL)
            assert rig.router.services.num_queued > 100, "and the others still wait"
        rig.prefill.open_gate(Gate.PREFILL)
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*(client.receive() for client in greedy))
        assert {answer.status for answer in answers} == {200}
        assert len(rig.decode.seen) == len(greedy) + 5
        assert await rig.metric('pdcluster_router_queue_wait_seconds_count{client="modest"}') == 5
        assert await rig.metric('pdcluster_router_queue_wait_seconds_count{client="greedy"}') == 300
        assert await rig.metric('pdcluster_router_queue_wait_seconds_sum{client="greedy"}') > 0
        assert all(seen.body["priority"] == 7 for seen in rig.decode.seen), "the client's own word goes to the engines"


def clients_that_wait(rig: Rig) -> set[str]:
    waiting = [one for admission in rig.router.services.admissions for one in admission.waiters]
    return {one.request.client for one in waiting}


@pytest.mark.parametrize(
    ("greedy", "modest", "order"),
    [("", "weight=2", "gmmgmmgg"), ("priority=1", "", "mmmmgggg"), ("", "priority=1", "ggggmmmm")],
)
async def test_weight_and_priority_of_a_key_stand_in_the_file_of_keys(
    tmp_path: Path, greedy: str, modest: str, order: str
) -> None:
    async with running_rig(**ONE, api_key_file=keys_in(tmp_path, greedy, modest)) as rig:
        clients = await occupied(rig, 4)
        clients += [await ask(rig, "modest", OTHER) for _ in range(4)]
        await queued(rig, 8)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients] == [200] * 9
        assert "".join(prompt[0] for prompt in prompts(rig)[1:]) == order


async def test_a_key_that_fills_the_queue_gives_its_newest_place_to_another_key(tmp_path: Path) -> None:
    async with running_rig(**ONE, api_key_file=keys_in(tmp_path), max_queued_requests=3) as rig:
        clients = await occupied(rig, 3)
        clients.append(await ask(rig, "modest", OTHER))
        newest = await answer_to(clients.pop(3))
        assert (newest.status, newest.json()["error"]["code"]) == (429, "queue_full")
        assert "retry-after" in newest.headers
        too_many = await answer_to(await ask(rig, "greedy", KEY))
        assert (too_many.status, too_many.json()["error"]["code"]) == (429, "queue_full")
        assert await rig.failures() == {"queue_full": 2}
        assert await rig.metric('pdcluster_router_queue_wait_seconds_count{client="greedy"}') == 1
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients] == [200] * 4
        assert prompts(rig) == ["greedy", "greedy", "modest", "greedy"]


def taken_s(rig: Rig) -> float:
    """Until when the greedy key's rate flows in again, in seconds: ten for each request."""
    use = rig.router.access.uses.of("greedy")
    rate = use.requests_left(0.0) if use is not None else None
    assert rate is not None
    return rate.full_in_s


async def test_one_that_gets_no_place_gives_its_rate_back_and_one_that_leaves_does_not(tmp_path: Path) -> None:
    """Else others' requests would use up a key's rate, and one that comes and leaves would have places for nothing."""
    file = keys_in(tmp_path, "requests_per_minute=6")
    async with running_rig(**ONE, api_key_file=file, max_queued_requests=3) as rig:
        clients = await occupied(rig, 3)
        taken = taken_s(rig)
        assert (await answer_to(await ask(rig, "greedy", KEY))).json()["error"]["code"] == "queue_full"
        assert taken_s(rig) == pytest.approx(taken)
        clients.append(await ask(rig, "modest", OTHER))
        assert (await answer_to(clients.pop(3))).json()["error"]["code"] == "queue_full"
        assert taken_s(rig) == pytest.approx(taken - 10)
        clients.pop(2).leave()
        await queued(rig, 2)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients] == [200] * 3
        assert taken_s(rig) == pytest.approx(taken - 10)


async def ask_in_parts(rig: Rig, num_prompts: int, key: str = KEY) -> Message:
    client = await rig.client()
    body = json.dumps({"model": "m", "prompt": ["p" * 400] * num_prompts}).encode()
    await client.send(request_bytes(COMPLETIONS, body, bearer(key)))
    return await answer_to(client)


async def backlog_is(rig: Rig, num_tokens: int) -> None:
    await until(lambda: rig.router.services.admissions.shared[Role.PREFILL].backlog_tokens == num_tokens)


async def test_a_request_in_parts_gives_its_rate_back_if_no_part_has_entered(tmp_path: Path) -> None:
    file = keys_in(tmp_path, "requests_per_minute=6")
    async with running_rig(max_prefill_backlog_tokens=20, api_key_file=file, max_queued_requests=1) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await ask(rig, "p" * 400, KEY)]
        await backlog_is(rig, 5)
        taken = taken_s(rig)
        answer = await ask_in_parts(rig, 6)
        assert answer.json()["error"]["code"] == "queue_full", "three parts have entered, and the fifth has no place"
        assert taken_s(rig) == pytest.approx(taken + 10)
        await backlog_is(rig, 5)
        clients += [await ask(rig, "p" * 400, KEY) for _ in range(3)]
        await backlog_is(rig, 20)
        answer = await ask_in_parts(rig, 2)
        assert answer.json()["error"]["code"] == "queue_full"
        assert taken_s(rig) == pytest.approx(taken + 40)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients] == [200] * 4


async def test_a_request_in_parts_that_took_places_of_another_key_gives_nothing_back(tmp_path: Path) -> None:
    """All its places are free once one part is refused: it could push others' requests out again and again."""
    file = keys_in(tmp_path, "", "requests_per_minute=6")
    async with running_rig(**ONE, api_key_file=file, max_queued_requests=6) as rig:
        clients = await occupied(rig, 6)
        answer = await ask_in_parts(rig, 6, OTHER)
        assert answer.json()["error"]["code"] == "queue_full", "three parts have places, and the fourth gets none"
        assert answer.headers["x-ratelimit-remaining-requests"] == "5"
        assert {(await answer_to(client)).status for client in clients[4:]} == {429}
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients[:4]] == [200] * 4


async def test_a_request_in_parts_that_waited_too_long_gives_nothing_back(tmp_path: Path) -> None:
    file = keys_in(tmp_path, "requests_per_minute=6")
    async with running_rig(**ONE, api_key_file=file, queue_timeout_s=0.1) as rig:
        for _ in range(3):
            assert (await answer_to(await ask(rig, "greedy", KEY))).status == 200
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await ask(rig, "greedy", KEY)]
        await backlog_is(rig, 1)
        taken = taken_s(rig)
        assert (await ask_in_parts(rig, 2)).json()["error"]["code"] == "queue_timeout"
        assert taken_s(rig) == pytest.approx(taken + 10)
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await answer_to(clients[0])).status == 200


async def test_the_next_request_of_a_connection_that_lost_its_place_is_answered_too(tmp_path: Path) -> None:
    """It comes to the queue while the one that took the place is being seated."""
    async with running_rig(**ONE, api_key_file=keys_in(tmp_path), max_queued_requests=3) as rig:
        clients = await occupied(rig, 2)
        newest = await ask(rig, "greedy", KEY)
        await queued(rig, 3)
        body = json.dumps({"model": "m", "prompt": "greedy"}).encode()
        await newest.send(request_bytes(COMPLETIONS, body, bearer(KEY)))
        clients.append(await ask(rig, "modest", OTHER))
        answers = [await answer_to(newest) for _ in range(2)]
        assert [answer.json()["error"]["code"] for answer in answers] == ["queue_full"] * 2
        assert rig.router.services.num_queued == 3
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients] == [200] * 4


@pytest.mark.parametrize(
    ("greedy", "modest", "order"),
    [("", "weight=2", "gmmgmmgg"), ("priority=1", "", "mmmmgggg"), ("weight=5 priority=-3", "", "ggggmmmm")],
)
async def test_a_weight_and_a_priority_that_change_hold_at_once_for_what_waits(
    tmp_path: Path, greedy: str, modest: str, order: str
) -> None:
    file = keys_in(tmp_path)
    async with running_rig(**ONE, api_key_file=file, api_key_interval_s=0.02) as rig:
        clients = await occupied(rig, 5)
        clients += [await ask(rig, "modest", OTHER) for _ in range(4)]
        await queued(rig, 9)
        before = rig.router.access.keys
        keys_in(tmp_path, greedy, modest)
        await until(lambda: rig.router.access.keys is not before)
        clients.pop(5).leave()
        await queued(rig, 8)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients] == [200] * 9
        assert "".join(prompt[0] for prompt in prompts(rig)[1:]) == order


async def test_a_key_that_is_gone_from_the_file_is_served_as_one_without_settings(tmp_path: Path) -> None:
    file = keys_in(tmp_path, "weight=9 priority=-5")
    async with running_rig(**ONE, api_key_file=file, api_key_interval_s=0.02) as rig:
        clients = await occupied(rig, 2)
        clients += [await ask(rig, "modest", OTHER) for _ in range(2)]
        await queued(rig, 4)
        before = rig.router.access.keys
        file.write_text(line(OTHER, "modest"))
        await until(lambda: rig.router.access.keys is not before)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients] == [200] * 5
        assert "".join(prompt[0] for prompt in prompts(rig)[1:]) == "gmgm"


async def test_without_keys_all_requests_have_one_line(tmp_path: Path) -> None:
    async with running_rig(**ONE) as rig:
        clients = await occupied(rig, 1)
        clients.append(await ask(rig, "modest", OTHER))
        await queued(rig, 2)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients] == [200] * 3
        assert prompts(rig) == ["greedy", "greedy", "modest"]
        assert await rig.metric('pdcluster_router_queue_wait_seconds_count{client=""}') == 2
