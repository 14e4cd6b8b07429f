"""Limits of API keys: who is turned away and how it is told, that no engine hears of it, and that slots come back."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.messages import MESSAGES
from fakes.router import CHAT, COMPLETIONS, PROMPT, Rig, running_rig, until
from integration.test_router_access import KEY, OTHER, bearer, line
from patience import PATIENCE_S
from pdcluster_router.core.clients.key_limits import KeyUse, LimitedBy

pytestmark = pytest.mark.anyio

SAYS = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: PROMPT,
    CHAT: {"model": "m", "messages": SAYS, "stream": True},
    MESSAGES: {"model": "m", "messages": SAYS, "max_tokens": 9},
}


def keys_in(folder: Path, limits: str) -> Path:
    """A file of two keys, the first of which has these limits."""
    file = folder / "keys"
    file.write_text(line(KEY, f"team-a {limits}") + line(OTHER, "team-b"))
    return file


def use_in(rig: Rig) -> KeyUse:
    use = rig.router.access.uses.of("team-a")
    assert use is not None
    return use


async def begin(rig: Rig, path: str = COMPLETIONS, key: str = KEY) -> RawClient:
    client = await rig.client()
    await client.send(request_bytes(path, json.dumps(BODIES[path]).encode(), bearer(key)))
    return client


async def answer_to(client: RawClient) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await client.receive()


@pytest.mark.parametrize("path", BODIES)
async def test_one_request_too_many_at_once_is_told_so_and_costs_no_engine_anything(tmp_path: Path, path: str) -> None:
    async with running_rig(api_key_file=keys_in(tmp_path, "max_concurrent=2")) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        running = [await begin(rig), await begin(rig)]
        await until(lambda: len(rig.decode.seen) == 2)
        client = await begin(rig, path)
        answer = await answer_to(client)
        assert (answer.status, answer.headers["retry-after"]) == (429, "2")
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("too_many_running", "rate_limit_error")
        assert "team-a may have 2 requests at once (max_concurrent), and has as many: wait" in error["message"]
        assert (answer.json().get("type") == "error") is (path == MESSAGES), "each API has its own shape"
        other = await begin(rig, key=OTHER)
        await until(lambda: len(rig.decode.seen) == 3)
        rig.decode.open_gate(Gate.RESERVE)
        for one in (*running, other):
            assert (await answer_to(one)).status == 200
        await client.send(request_bytes(path, json.dumps(BODIES[path]).encode(), bearer(KEY)))
        assert (await answer_to(client)).status == 200, "its connection goes on"
        assert len(rig.decode.seen) == 4
        assert len(rig.prefill.seen) == 4
        limited = 'pdcluster_router_key_limited_total{client="team-a",limit="max_concurrent"}'
        assert await rig.metric(limited) == 1
        assert await rig.metric('pdcluster_router_requests_total{outcome="limited"}') == 1
        assert await rig.metric('pdcluster_router_key_running{client="team-a"}') == 0


@pytest.mark.parametrize(
    ("limits", "code", "says"),
    [
        ("requests_per_minute=1", "too_many_requests", "may send 1 requests a minute (requests_per_minute)"),
        ("prompt_tokens_per_minute=20", "too_many_tokens", "and of 20 a minute (prompt_tokens_per_minute)"),
    ],
)
async def test_more_than_a_rate_is_told_when_asking_again_helps(
    tmp_path: Path, limits: str, code: str, says: str
) -> None:
    async with running_rig(api_key_file=keys_in(tmp_path, limits)) as rig:
        client = await begin(rig)
        assert (await answer_to(client)).status == 200
        await client.send(request_bytes(COMPLETIONS, json.dumps(PROMPT).encode(), bearer(KEY)))
        answer = await answer_to(client)
        assert answer.status == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == code
        assert says in answer.json()["error"]["message"]
        assert f"try again in {answer.headers['retry-after']} s" in answer.json()["error"]["message"]
        assert len(rig.decode.seen) == 1


RATE = ("limit", "remaining", "reset")


def rate_in(answer: Message, what: str = "requests") -> list[str | None]:
    return [answer.headers.get(f"x-ratelimit-{word}-{what}") for word in RATE]


@pytest.mark.parametrize("path", BODIES)
async def test_answers_tell_by_openais_names_what_a_key_has_left_of_its_requests_a_minute(
    tmp_path: Path, path: str
) -> None:
    async with running_rig(api_key_file=keys_in(tmp_path, "requests_per_minute=2")) as rig:
        client = await begin(rig, path)
        assert rate_in(await answer_to(client)) == ["2", "1", "30s"]
        rig.decode.fault = Fault.ERROR_404
        answers = []
        for _ in range(2):
            await client.send(request_bytes(path, json.dumps(BODIES[path]).encode(), bearer(KEY)))
            answers.append(await answer_to(client))
        assert [answer.status for answer in answers] == [404, 429]
        assert [rate_in(answer)[:2] for answer in answers] == [["2", "0"]] * 2
        assert all(0 < float(str(rate_in(answer)[2]).removesuffix("s")) <= 60 for answer in answers)
        assert rate_in(await answer_to(await begin(rig, path, OTHER))) == [None] * 3


async def test_a_key_without_a_rate_is_told_none(tmp_path: Path) -> None:
    async with running_rig(api_key_file=keys_in(tmp_path, "max_concurrent=1")) as rig:
        assert not [name for name in (await answer_to(await begin(rig))).headers if "ratelimit" in name]


@pytest.mark.parametrize("path", BODIES)
async def test_answers_tell_by_openais_names_what_a_key_has_left_of_its_prompt_tokens(
    tmp_path: Path, path: str
) -> None:
    async with running_rig(api_key_file=keys_in(tmp_path, "prompt_tokens_per_minute=24")) as rig:
        client = await begin(rig, path)
        answers = [await answer_to(client)]
        while answers[-1].status == 200:
            await client.send(request_bytes(path, json.dumps(BODIES[path]).encode(), bearer(KEY)))
            answers.append(await answer_to(client))
        wanted, left = re.findall(r"counts as (\d+) tokens.* has (\d+) left", answers[-1].json()["error"]["message"])[0]
        all_in_s = int(wanted) * 60 / 24
        assert rate_in(answers[0], "tokens") == ["24", str(24 - int(wanted)), f"{all_in_s:g}s"]
        assert rate_in(answers[-1], "tokens")[:2] == ["24", left]
        assert rate_in(await answer_to(await begin(rig, path, OTHER)), "tokens") == [None] * 3


async def test_a_prompt_that_never_fits_is_told_that_all_tokens_are_there(tmp_path: Path) -> None:
    async with running_rig(api_key_file=keys_in(tmp_path, "prompt_tokens_per_minute=3")) as rig:
        answer = await answer_to(await begin(rig))
        assert (answer.status, rate_in(answer, "tokens"), rate_in(answer)) == (413, ["3", "3", "0s"], [None] * 3)


async def test_keys_that_name_no_limit_have_that_of_the_defaults(tmp_path: Path) -> None:
    file = keys_in(tmp_path, "requests_per_minute=9")
    file.write_text("defaults requests_per_minute=5\n" + file.read_text())
    async with running_rig(api_key_file=file) as rig:
        answers = [await answer_to(await begin(rig, key=key)) for key in (KEY, OTHER)]
        assert [rate_in(answer)[:2] for answer in answers] == [["9", "8"], ["5", "4"]]


async def test_a_prompt_that_never_fits_is_no_429(tmp_path: Path) -> None:
    """Clients' libraries would try it again and again."""
    async with running_rig(api_key_file=keys_in(tmp_path, "prompt_tokens_per_minute=3")) as rig:
        answer = await answer_to(await begin(rig))
        assert (answer.status, answer.json()["error"]["code"]) == (413, "prompt_over_limit")
        assert "retry-after" not in answer.headers
        assert rig.decode.seen == []


async def test_limits_follow_the_file_and_what_runs_counts_on(tmp_path: Path) -> None:
    file = keys_in(tmp_path, "max_concurrent=1")
    async with running_rig(api_key_file=file, api_key_interval_s=0.01) as rig:
        rig.decode.close_gate(Gate.RESERVE)
        clients = [await begin(rig)]
        await until(lambda: len(rig.decode.seen) == 1)
        assert (await answer_to(await begin(rig))).status == 429
        keys_in(tmp_path, "max_concurrent=2")
        await until(
            lambda: rig.router.access.keys is not None and "max_concurrent=2" in repr(rig.router.access.keys.limits)
        )
        clients.append(await begin(rig))
        await until(lambda: len(rig.decode.seen) == 2)
        assert (await answer_to(await begin(rig))).status == 429
        rig.decode.open_gate(Gate.RESERVE)
        for client in clients:
            assert (await answer_to(client)).status == 200


# However a request ends, its slot comes back: ``running_rig`` looks once more when all is over.


async def leaves_in_decode(rig: Rig) -> None:
    rig.decode.close_gate(Gate.RESERVE)
    client = await begin(rig)
    await rig.decode.next_request()
    assert use_in(rig).num_running == 1
    client.leave()
    await until(lambda: use_in(rig).num_running == 0)
    rig.decode.open_gate(Gate.RESERVE)


async def leaves_in_a_stream(rig: Rig) -> None:
    rig.decode.close_gate(Gate.SECOND_TOKEN)
    client = await begin(rig, CHAT)
    await client.reader.readuntil(b"data: ")
    assert use_in(rig).num_running == 1
    client.leave()
    await until(lambda: use_in(rig).num_running == 0)
    rig.decode.open_gate(Gate.SECOND_TOKEN)


async def leaves_before_its_turn(rig: Rig) -> None:
    """Behind another one on its connection: it does not run yet."""
    rig.decode.close_gate(Gate.RESERVE)
    client = await begin(rig)
    await rig.decode.next_request()
    await client.send(request_bytes(COMPLETIONS, json.dumps(PROMPT).encode(), bearer(KEY)))
    client.leave()
    await until(lambda: use_in(rig).num_running == 0)
    rig.decode.open_gate(Gate.RESERVE)


async def is_refused_by_decode(rig: Rig) -> None:
    rig.decode.fault = Fault.ERROR_503
    assert (await answer_to(await begin(rig))).status >= 500
    rig.decode.fault = Fault.NONE


async def sends_what_is_no_request(rig: Rig) -> None:
    client = await rig.client()
    assert (await client.post(COMPLETIONS, b"{", bearer(KEY))).status == 400
    assert (await client.post(COMPLETIONS, b"", bearer(OTHER + KEY))).status == 401


ENDS: list[Callable[[Rig], Awaitable[None]]] = [
    leaves_in_decode,
    leaves_in_a_stream,
    leaves_before_its_turn,
    is_refused_by_decode,
    sends_what_is_no_request,
]


@pytest.mark.parametrize("end", ENDS)
async def test_the_slot_of_a_request_comes_back_however_it_ends(
    tmp_path: Path, end: Callable[[Rig], Awaitable[None]]
) -> None:
    async with running_rig(api_key_file=keys_in(tmp_path, "max_concurrent=1"), max_decode_attempts=1) as rig:
        for _ in range(3):
            await end(rig)
            await until(lambda: use_in(rig).num_running == 0)
            await until(lambda: not rig.router.services.running)


async def test_the_slot_of_a_request_that_is_turned_away_at_the_queue_comes_back(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_prefill_backlog_tokens": 1, "max_queued_requests": 1}
    async with running_rig(api_key_file=keys_in(tmp_path, "max_concurrent=3"), **limits) as rig:
        rig.prefill.close_gate(Gate.RESERVE)
        rig.decode.close_gate(Gate.RESERVE)
        clients = [await begin(rig), await begin(rig)]
        await until(lambda: rig.router.services.num_queued == 1)
        assert use_in(rig).num_running == 2, "one that waits counts too"
        assert (await answer_to(await begin(rig))).json()["error"]["code"] == "queue_full"
        assert use_in(rig).num_running == 2
        clients[1].leave()
        await until(lambda: use_in(rig).num_running == 1)
        rig.decode.open_gate(Gate.RESERVE)
        rig.prefill.open_gate(Gate.RESERVE)
        assert (await answer_to(clients[0])).status == 200


async def test_slots_come_back_whatever_clients_and_engines_do_in_whatever_order(tmp_path: Path) -> None:
    """A walk with a fixed seed over begins, ends, broken engines and clients that leave."""
    walk, most = Random(17), 3
    async with running_rig(api_key_file=keys_in(tmp_path, f"max_concurrent={most}")) as rig:
        use, clients, closed = use_in(rig), list[RawClient](), set[Gate]()
        for _ in range(120):
            match walk.randrange(5):
                case 0 | 1:
                    clients.append(await begin(rig, walk.choice(list(BODIES))))
                case 2 if clients:
                    clients.pop(walk.randrange(len(clients))).leave()
                case 3:
                    rig.decode.fault = walk.choice([Fault.NONE, Fault.ERROR_503, Fault.DIE, Fault.DIE_MID_STREAM])
                case 4:
                    gate = walk.choice([Gate.RESERVE, Gate.ANSWER])
                    (rig.decode.open_gate if gate in closed else rig.decode.close_gate)(gate)
                    closed ^= {gate}
            for _ in range(walk.randrange(30)):
                await asyncio.sleep(0)
            assert 0 <= use.num_running <= most
        rig.decode.fault = Fault.NONE
        for gate in closed:
            rig.decode.open_gate(gate)
        await until(lambda: use.num_running == 0)
        assert (await answer_to(await begin(rig))).status == 200
        assert use.num_refused[LimitedBy.MAX_CONCURRENT] > 0, "the walk has met no limit"


async def test_a_limited_request_has_its_line_in_the_access_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with running_rig(api_key_file=keys_in(tmp_path, "requests_per_minute=1"), access_log=log) as rig:
        assert [(await answer_to(await begin(rig))).status for _ in range(2)] == [200, 429]
    lines = [json.loads(text) for text in log.read_text().splitlines()]
    assert [(one["status"], one["outcome"], one["client"]) for one in lines] == [
        (200, "ok", "team-a"),
        (429, "limited", "team-a"),
    ]
    assert KEY not in log.read_text()
