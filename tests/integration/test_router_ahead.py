"""``why`` says whose requests were let in while one waited in the queue."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from fakes.faults import Gate
from fakes.http import RawClient, request_bytes
from fakes.router import COMPLETIONS, Rig, running_rig, until
from integration.test_router_access import KEY, OTHER, bearer, line
from integration.test_router_fair_queue import ONE, answer_to, keys_in, queued
from pdcluster_cli.cluster.request_text import describe
from pdcluster_protocol.kept import KeptAnswer, KeptRequest, LineAhead, path_for
from pdcluster_protocol.labels import Role
from pdcluster_protocol.status_page import STATUS_PATH, StatusPage

pytestmark = pytest.mark.anyio


async def ask(rig: Rig, request_id: str, key: str, num_letters: int = 40, **more: object) -> RawClient:
    client = await rig.client()
    body = json.dumps({"model": "m", "prompt": "p" * num_letters, **more}).encode()
    headers = {**bearer(key), "x-request-id": request_id}
    await client.send(request_bytes(COMPLETIONS, body, headers))
    return client


async def about(rig: Rig, name: str) -> KeptRequest:
    answer = await (await rig.internal()).get(path_for(name))
    assert KEY not in answer.body.decode()
    (request,) = msgspec.json.decode(answer.body, type=KeptAnswer).requests
    return request


def lines_of(request: KeptRequest) -> list[tuple[str, int]]:
    assert request.ahead is not None
    assert (
        request.ahead.num_known == request.ahead.num_requests == sum(line.num_requests for line in request.ahead.lines)
    )
    return [(line.client, line.num_requests) for line in request.ahead.lines]


async def test_of_each_request_that_waited_it_is_told_whose_were_let_in_before_it(tmp_path: Path) -> None:
    async with running_rig(**ONE, api_key_file=keys_in(tmp_path), max_queued_requests=6) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await ask(rig, "first", KEY)]
        await rig.prefill.next_request()
        for number in range(1, 6):
            clients.append(await ask(rig, f"g{number}", KEY))
            await queued(rig, number)
        clients.append(await ask(rig, "m1", OTHER))
        await queued(rig, 6)
        displaced = await ask(rig, "m2", OTHER)
        assert (await answer_to(clients.pop(5))).json()["error"]["code"] == "queue_full"
        waits = await about(rig, "m1")
        assert (waits.ended_at_unix_s, lines_of(waits)) == (None, [])
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in (*clients, displaced)] == [200] * 7
        await rig.settled()
        told = {name: await about(rig, name) for name in ("first", "g1", "g2", "g4", "g5", "m1", "m2")}
        document = (await (await rig.internal()).get(STATUS_PATH)).body
        rows = {row.request_id: row for row in msgspec.json.decode(document, type=StatusPage).recent}
    assert [step.text for step in rows["m2"].steps if step.kind == "queue"] == [
        "waits to be admitted, behind 2 of greedy, 1 of modest"
    ]
    assert told.pop("first").ahead is None, "it did not wait"
    assert {name: lines_of(request) for name, request in told.items()} == {
        "g1": [],
        "m1": [("greedy", 1)],
        "g2": [("greedy", 1), ("modest", 1)],
        "m2": [("greedy", 2), ("modest", 1)],
        "g4": [("greedy", 3), ("modest", 2)],
        "g5": [],
    }, "g5 was displaced before any was let in"
    ahead = told["m2"].ahead
    assert ahead is not None
    assert ahead.lines[0] == LineAhead("greedy", 2, 2), "of an engine's limit of one token each counts as one"
    assert (
        "ahead: 3 requests let in while it waited in the queue: 2 of greedy (2 tokens), 1 of its own key"
        in describe(told["m2"], {}, "router-1")
    )


async def test_of_requests_that_are_let_in_together_the_first_is_ahead_of_the_next(tmp_path: Path) -> None:
    async with running_rig(max_prefill_backlog_tokens=80, api_key_file=keys_in(tmp_path)) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await ask(rig, f"large{number}", KEY, num_letters=4000) for number in range(4)]
        await until(lambda: rig.router.services.admissions.shared[Role.PREFILL].backlog_tokens == 80)
        for number, (name, key) in enumerate((("g1", KEY), ("m1", OTHER), ("g2", KEY)), start=1):
            clients.append(await ask(rig, name, key))
            await queued(rig, number)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients] == [200] * 7
        await rig.settled()
        told = {name: lines_of(await about(rig, name)) for name in ("g1", "m1", "g2")}
    assert told == {"g1": [], "m1": [("greedy", 1)], "g2": [("greedy", 1), ("modest", 1)]}


async def test_of_many_keys_ahead_the_first_are_named_and_the_others_counted(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("".join(line(f"sk-{number}", f"key-{number}") for number in range(7)))
    async with running_rig(**ONE, api_key_file=file) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await ask(rig, "first", "sk-0")]
        await rig.prefill.next_request()
        for number in range(7):
            clients.append(await ask(rig, f"r{number}", f"sk-{number}"))
            await queued(rig, number + 1)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients] == [200] * 8
        await rig.settled()
        ahead = (await about(rig, "r6")).ahead
    assert ahead is not None
    assert [line.client for line in ahead.lines] == ["key-0", "key-1", "key-2", "key-3"]
    assert (ahead.num_requests, ahead.num_known, ahead.num_other_keys) == (6, 6, 2)


async def test_a_request_in_parts_tells_what_was_ahead_of_the_part_that_waited_longest(tmp_path: Path) -> None:
    async with running_rig(**ONE, api_key_file=keys_in(tmp_path)) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await ask(rig, "first", KEY)]
        await rig.prefill.next_request()
        clients.append(await ask(rig, "whole", OTHER, n=2, temperature=1.0))
        await queued(rig, 2)
        clients.append(await ask(rig, "g1", KEY))
        await queued(rig, 3)
        rig.prefill.open_gate(Gate.PREFILL)
        assert [(await answer_to(client)).status for client in clients] == [200] * 3
        await rig.settled()
        whole, last = await about(rig, "whole"), await about(rig, "whole-1")
    assert lines_of(whole) == lines_of(last) == [("greedy", 1), ("modest", 1)]
