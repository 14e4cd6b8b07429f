"""Decode says that it computes what it lacks of a prompt itself: prefill's room is free at once, and nothing waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.faults import Fault, Gate
from fakes.http import RawClient
from fakes.reservations import CACHED_TOKENS, PROMPT_TOKENS, local_prefill_of, reservation_call, reservation_of
from fakes.router import BOTH, PROMPT, STREAM, Rig, params_of, post, raw, running_rig, send, until
from pdcluster_protocol.labels import Role

pytestmark = pytest.mark.anyio

LOCAL_TOKENS = PROMPT_TOKENS - CACHED_TOKENS


def backlogs(rig: Rig) -> tuple[int, int]:
    """Prompt tokens that wait for prefill engines, and for decode engines."""
    admissions = rig.router.services.admissions.shared
    return admissions[Role.PREFILL].backlog_tokens, admissions[Role.DECODE].backlog_tokens


def decode_params(rig: Rig, number: int = 0) -> dict[str, Any]:
    params = rig.decode.seen[number].params
    assert params is not None
    return params


@BOTH
async def test_the_answer_is_decodes_and_no_prefill_engine_is_asked(body: dict[str, Any], tmp_path: Path) -> None:
    async with running_rig(trace_file=str(tmp_path / "trace")) as rig:
        rig.decode.fault = Fault.LOCAL
        answer = await post(rig, body)
        assert (answer.status, answer.is_whole) == (200, True)
        assert rig.prefill.seen == []
        assert await rig.failures() == {}
    line = json.loads((tmp_path / "trace").read_text())
    assert (line["prompt_tokens"], line["cached_tokens"]) == (PROMPT_TOKENS, CACHED_TOKENS)
    assert (line["reserved_at"], line["prefill_sent_at"]) == (None, None)


async def test_its_share_moves_from_prefill_to_decode_before_its_answer_begins() -> None:
    """An answer that is not streamed begins with its last token."""
    async with running_rig(max_prefill_backlog_tokens=4) as rig:
        rig.decode.faults_to_come = [Fault.LOCAL]
        rig.decode.close_gate(Gate.ANSWER)
        first = await send(rig, PROMPT)
        await until(lambda: backlogs(rig) == (0, 1))
        second = await send(rig, PROMPT)
        await until(lambda: len(rig.prefill.seen) == 1)
        rig.decode.open_gate(Gate.ANSWER)
        assert [(await client.receive()).status for client in (first, second)] == [200, 200]


async def sent_to_a_local_prefill(rig: Rig) -> RawClient:
    """Decode has said that it computes ``LOCAL_TOKENS`` itself; its answer waits at the gate."""
    rig.decode.fault = Fault.LOCAL
    rig.decode.close_gate(Gate.ANSWER)
    client = await send(rig, PROMPT)
    await until(lambda: backlogs(rig) == (0, LOCAL_TOKENS))
    return client


async def test_its_tokens_are_those_that_decode_lacks() -> None:
    async with running_rig() as rig:
        client = await sent_to_a_local_prefill(rig)
        rig.decode.open_gate(Gate.ANSWER)
        assert (await client.receive()).status == 200


async def test_what_comes_after_the_answers_begin_or_end_changes_nothing() -> None:
    async with running_rig() as rig:
        rig.decode.fault = Fault.CACHED
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        client = await send(rig, STREAM)
        await client.reader.readuntil(b"Hello")
        late = local_prefill_of(decode_params(rig))
        assert (await rig.reserve(late)).status == 200
        assert backlogs(rig) == (0, 0)
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        await client.reader.readuntil(b"0\r\n\r\n")
        await rig.settled()
        assert (await rig.reserve(late)).status == 200
        assert await rig.failures() == {}


async def test_no_reservation_follows_and_the_same_word_again_changes_nothing() -> None:
    async with running_rig() as rig:
        client = await sent_to_a_local_prefill(rig)
        assert (await rig.reserve(local_prefill_of(decode_params(rig)))).json()["status"] == "ok"
        refused = (await rig.reserve(reservation_of(decode_params(rig)))).json()
        assert refused["reason"] == "this request does not wait for a reservation any more"
        assert (backlogs(rig), rig.prefill.seen) == ((0, LOCAL_TOKENS), [])
        rig.decode.open_gate(Gate.ANSWER)
        assert (await client.receive()).status == 200


@BOTH
async def test_a_decode_that_dies_with_it_is_replaced_by_another(body: dict[str, Any]) -> None:
    async with running_rig(num_decode=2) as rig:
        for _ in rig.decodes:
            await post(rig, body)
        for engine in rig.decodes:
            engine.faults_to_come = [Fault.LOCAL_AND_DIE, Fault.NONE]
        rig.decodes[1].faults_to_come = []
        answers = [await post(rig, body) for _ in rig.decodes]
        assert [answer.status for answer in answers] == [200, 200]
        assert await rig.failures() == {"decode_lost": 1}


async def test_a_transfer_of_which_decode_has_spoken_is_not_sent_again_as_if_it_had_not() -> None:
    """The engine's end of the kept connection closes before it has read the request, and still its word is here."""
    async with running_rig() as rig:
        client, engine = await rig.client(), await rig.internal()
        for one in (client, engine):
            assert (await one.get("/health")).status == 200
        rig.decode.hang_up_on_all()
        rig.feed(client, raw(PROMPT))
        (transfer_id,) = rig.router.services.transfers
        rig.feed(engine, reservation_call(local_prefill_of(params_of(transfer_id))))
        assert (await client.receive()).status == 502
        assert rig.decode.seen == []
        assert await rig.failures() == {"decode_lost": 1, "no_decode": 1}


async def test_a_client_that_leaves_meanwhile_stops_decode_and_gives_the_share_back() -> None:
    async with running_rig() as rig:
        client = await sent_to_a_local_prefill(rig)
        client.leave()
        await until(lambda: backlogs(rig) == (0, 0))
        await rig.decode.seen[0].ended.wait()
        assert rig.decode.seen[0].is_disconnected
