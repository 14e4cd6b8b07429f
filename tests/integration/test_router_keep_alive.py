"""Streams that bring nothing for a while are kept alive by comments, and what goes wrong then is told in the stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import openai
import pytest

from fakes.answers import END, STREAM_HEAD, answer, chunk
from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient
from fakes.messages import MESSAGES
from fakes.router import CHAT, COMPLETIONS, PROMPT, STREAM, Rig, attempts, running_rig, until
from patience import PATIENCE_S
from pdcluster_router.core.requests.keep_alive import COMMENT

pytestmark = pytest.mark.anyio

SOON_S: Final = 0.1
TALK: Final[dict[str, Any]] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
PATHS: Final[dict[str, dict[str, Any]]] = {
    COMPLETIONS: STREAM,
    CHAT: {**TALK, "stream": True},
    MESSAGES: {**TALK, "stream": True},
}
EACH_PATH = pytest.mark.parametrize("path", PATHS)


@asynccontextmanager
async def quick_rig(**settings: Any) -> AsyncIterator[Rig]:
    """Comments come soon."""
    async with running_rig(**{"keep_alive_s": SOON_S, **settings}) as rig:
        yield rig


async def num_comments(rig: Rig) -> int:
    return int(await rig.metric("pdcluster_router_keep_alives_total"))


async def commented(rig: Rig, num: int = 2) -> None:
    """So many comments were written since the router began."""
    await until(lambda: rig.router.keep_alives.num_comments >= num)


def without_comments(got: Message) -> bytes:
    """The stream behind the comments that it began with: at least one."""
    stream = b"".join(got.chunks) or got.body
    assert stream.startswith(COMMENT)
    while stream.startswith(COMMENT):
        stream = stream.removeprefix(COMMENT)
    return stream


async def ask(rig: Rig, path: str, body: object = None) -> asyncio.Task[Message]:
    """A request is on its way; its answer is the task's."""
    client = await rig.client()
    return asyncio.create_task(client.post(path, body or PATHS[path]))


async def told(task: asyncio.Task[Message]) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await task


def code_in(path: str, stream: bytes) -> str:
    """Of the one error event that the stream is."""
    lines = stream.removesuffix(b"\n\n").split(b"\n")
    assert lines[:-1] == ([b"event: error"] if path == MESSAGES else [])
    said = json.loads(lines[-1].removeprefix(b"data: "))
    assert set(said) == ({"type", "error"} if path == MESSAGES else {"error"})
    return str(said["error"]["code"])


# Where a stream waits.


async def admitted_late(rig: Rig) -> tuple[asyncio.Task[Message], asyncio.Task[Message]]:
    """A stream that waits for room behind a first one, whose prefill waits too; the second has got a comment."""
    rig.prefill.close_gate(Gate.PREFILL)
    first = await ask(rig, COMPLETIONS, PROMPT)
    await rig.prefill.next_request()
    asked = await ask(rig, COMPLETIONS)
    await commented(rig)
    return first, asked


@EACH_PATH
@pytest.mark.parametrize("gate", [Gate.RESERVE, Gate.PREFILL])
async def test_a_stream_that_waits_for_its_engines_begins_with_comments(path: str, gate: Gate) -> None:
    async with quick_rig() as rig:
        engine = rig.decode if gate is Gate.RESERVE else rig.prefill
        engine.close_gate(gate)
        asked = await ask(rig, path)
        await commented(rig)
        engine.open_gate(gate)
        got = await told(asked)
        assert (got.status, got.is_whole) == (200, True)
        assert without_comments(got) == b"".join(rig.decode.events(rig.decode.seen[0]))
        assert got.headers["content-type"].startswith("text/event-stream")
        assert got.headers["x-accel-buffering"] == "no"
        assert got.headers["x-request-id"]
        assert await num_comments(rig) >= 2


async def test_a_stream_that_waits_to_be_admitted_begins_with_comments() -> None:
    async with quick_rig(max_prefill_backlog_tokens=1) as rig:
        first, asked = await admitted_late(rig)
        assert len(rig.decode.seen) == 1
        rig.prefill.open_gate(Gate.PREFILL)
        got = await told(asked)
        assert (got.status, got.is_whole) == (200, True)
        assert without_comments(got) == b"".join(rig.decode.events(rig.decode.seen[1]))
        assert got.headers["content-type"].startswith("text/event-stream")
        assert got.headers["date"]
        assert (await told(first)).status == 200


@EACH_PATH
async def test_a_stream_that_stalls_between_two_tokens_gets_comments_there(path: str) -> None:
    async with quick_rig() as rig:
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        asked = await ask(rig, path)
        await commented(rig)
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        got = await told(asked)
        assert got.is_whole
        blocks = got.body.split(b"\n\n")
        assert blocks.count(COMMENT.strip()) >= 2
        kept = [block for block in blocks if block != COMMENT.strip()]
        assert b"\n\n".join(kept) == b"".join(rig.decode.events(rig.decode.seen[0]))


async def test_no_comment_tears_an_event() -> None:
    async with quick_rig() as rig:
        rig.decode.fault = Fault.RAW
        rig.decode.raw = STREAM_HEAD + chunk(b"data: 1\n\ndata: {")
        client = await rig.client()
        asked = asyncio.create_task(client.post(COMPLETIONS, STREAM))
        await rig.decode.next_request()
        await asyncio.sleep(6 * SOON_S)
        before = await num_comments(rig)  # On a busy machine the event may be late.
        await asyncio.sleep(6 * SOON_S)
        assert await num_comments(rig) == before
        rig.decode.say(chunk(b"}\n\n"))
        await commented(rig, before + 1)
        rig.decode.say(END)
        got = await told(asked)
        assert got.body.replace(COMMENT, b"") == b"data: 1\n\ndata: {}\n\n"
        assert COMMENT in got.body


async def test_an_old_client_gets_the_comments_without_chunks() -> None:
    async with quick_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await rig.client()
        raw = json.dumps(STREAM).encode()
        await client.send(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw))
        await commented(rig)
        rig.prefill.open_gate(Gate.PREFILL)
        async with asyncio.timeout(PATIENCE_S):
            said = await client.reader.read()
        head, _, stream = said.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert stream.replace(COMMENT, b"") == b"".join(rig.decode.events(rig.decode.seen[0]))


# Who gets none.


@pytest.mark.parametrize("path", PATHS)
async def test_a_plain_answer_is_never_kept_alive(path: str) -> None:
    async with quick_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        asked = await ask(rig, path, {**PATHS[path], "stream": False})
        await rig.prefill.next_request()
        await asyncio.sleep(6 * SOON_S)
        rig.prefill.open_gate(Gate.PREFILL)
        got = await told(asked)
        assert (got.status, got.body) == (200, rig.decode.answer(rig.decode.seen[0]))
        assert await num_comments(rig) == 0


async def test_0_turns_it_off_and_errors_keep_their_status() -> None:
    async with quick_rig(keep_alive_s=0) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        asked = await ask(rig, COMPLETIONS)
        await rig.prefill.next_request()
        await asyncio.sleep(6 * SOON_S)
        rig.decode.hang_up_on_all()
        assert (await told(asked)).status == 502
        assert await num_comments(rig) == 0


async def test_a_stream_that_flows_and_one_that_is_soon_over_get_none() -> None:
    async with quick_rig(keep_alive_s=PATIENCE_S) as rig:
        for _ in range(3):
            got = await told(await ask(rig, COMPLETIONS))
            assert got.body == b"".join(rig.decode.events(rig.decode.seen[-1]))
        assert await num_comments(rig) == 0


async def test_a_client_that_takes_nothing_gets_no_comments_either() -> None:
    async with quick_rig(idle_timeout_s=PATIENCE_S) as rig:
        rig.decode.padding, rig.decode.tokens = "x" * 1_000_000, ["y"] * 64
        client = await rig.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport has it
        await client.send(_request(STREAM))
        await rig.decode.next_request()
        connection = rig.connection_of(client)
        await until(lambda: connection.is_full)
        size = connection.transport.get_write_buffer_size()
        before = await num_comments(rig)  # On a busy machine the first event may be late.
        await asyncio.sleep(6 * SOON_S)
        assert connection.transport.get_write_buffer_size() <= size
        assert await num_comments(rig) == before
        client.leave()


# What goes wrong after a comment.


@EACH_PATH
async def test_a_lost_decode_engine_is_not_seen_and_another_one_answers(path: str) -> None:
    async with quick_rig(num_decode=2, num_prefill=2) as rig:
        for engine in rig.decodes:
            engine.close_gate(Gate.RESERVE)
        asked = await ask(rig, path)
        await commented(rig)
        lost, other = rig.decodes if rig.decodes[0].seen else reversed(rig.decodes)
        other.open_gate(Gate.RESERVE)
        lost.hang_up_on_all()
        got = await told(asked)
        assert (got.status, got.is_whole) == (200, True)
        assert without_comments(got) == b"".join(other.events(other.seen[0]))
        assert attempts(rig) == [1]
        assert await rig.failures() == {"decode_lost": 1}


@EACH_PATH
async def test_an_engine_that_is_lost_for_good_is_an_event_and_a_cut(path: str) -> None:
    async with quick_rig() as rig:
        rig.decode.close_gate(Gate.RESERVE)
        asked = await ask(rig, path)
        await commented(rig)
        rig.decode.hang_up_on_all()
        got = await told(asked)
        assert (got.status, got.is_whole) == (200, False)
        assert code_in(path, without_comments(got)) == "decode_lost"
        assert await rig.metric('pdcluster_router_requests_total{outcome="lost"}') == 1


@EACH_PATH
async def test_a_decode_that_refuses_is_quoted_in_the_stream(path: str) -> None:
    async with quick_rig(on_prefill_failure="recompute") as rig:
        rig.prefill.fault = Fault.HANG
        rig.decode.close_gate(Gate.RESERVE)
        rig.decode.fault = Fault.HANG_UP_ON_METASERVER
        asked = await ask(rig, path)
        await commented(rig)
        rig.decode.open_gate(Gate.RESERVE)
        rig.decode.hang_up.set()
        got = await told(asked)
        stream = without_comments(got)
        assert (got.status, got.is_whole) == (200, False)
        assert b"gave up on the metaserver" in stream
        assert stream.startswith(b"event: error\ndata: " if path == MESSAGES else b"data: ")
        assert stream.count(b"\n\n") == 1


async def test_a_prefill_that_fails_for_good_is_an_event() -> None:
    async with quick_rig(on_prefill_failure="fail") as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        asked = await ask(rig, COMPLETIONS)
        await commented(rig)
        rig.prefill.hang_up_on_all()
        got = await told(asked)
        assert code_in(COMPLETIONS, without_comments(got)) == "prefill_failed"


@EACH_PATH
async def test_a_wait_for_admission_that_is_too_long_is_an_event(path: str) -> None:
    async with quick_rig(max_prefill_backlog_tokens=1, queue_timeout_s=5 * SOON_S) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        first = await ask(rig, COMPLETIONS, PROMPT)
        await rig.prefill.next_request()
        got = await told(await ask(rig, path))
        assert (got.status, got.is_whole) == (200, False)
        assert code_in(path, without_comments(got)) == "queue_timeout"
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await told(first)).status == 200


async def test_a_comment_is_no_byte_of_the_answer() -> None:
    async with quick_rig(first_byte_timeout_s=6 * SOON_S) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        got = await told(await ask(rig, COMPLETIONS))
        assert code_in(COMPLETIONS, without_comments(got)) == "deadline_passed"
        assert await rig.metric('pdcluster_router_phase_seconds_count{phase="first_byte"}') == 0


async def test_comments_do_not_hide_that_decode_has_stalled() -> None:
    async with quick_rig(idle_timeout_s=6 * SOON_S) as rig:
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        got = await told(await ask(rig, COMPLETIONS))
        assert not got.is_whole
        assert b'"code":"stalled"' in b"".join(got.chunks)
        assert COMMENT in got.body or COMMENT in got.chunks


async def test_an_engine_that_does_not_stream_is_lost_once_the_stream_has_begun() -> None:
    async with quick_rig(max_prefill_backlog_tokens=1) as rig:
        first, asked = await admitted_late(rig)
        rig.decode.fault, rig.decode.raw = Fault.RAW, answer(200, "application/json", b'{"choices":[]}')
        rig.prefill.open_gate(Gate.PREFILL)
        got = await told(asked)
        assert code_in(COMPLETIONS, without_comments(got)) == "decode_lost"
        assert (await told(first)).status == 200


@pytest.mark.parametrize("gate", [Gate.RESERVE, Gate.PREFILL])
async def test_a_client_that_leaves_between_two_comments_lets_both_engines_go(gate: Gate) -> None:
    async with quick_rig() as rig:
        waiting = rig.decode if gate is Gate.RESERVE else rig.prefill
        waiting.close_gate(gate)
        client: RawClient = await rig.client()
        await client.send(_request(STREAM))
        await commented(rig)
        client.leave()
        async with asyncio.timeout(PATIENCE_S):
            await rig.decode.seen[0].ended.wait()
            await waiting.seen[0].ended.wait()
        assert waiting.seen[0].is_disconnected
        assert await rig.failures() == {"client_gone": 1}


# Stock clients.


async def test_openais_sdk_reads_past_comments_and_raises_what_is_told_behind_them() -> None:
    async with quick_rig() as rig, openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as sdk:
        rig.prefill.close_gate(Gate.PREFILL)
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        stream = await sdk.chat.completions.create(model="m", messages=TALK["messages"], stream=True)
        assert not rig.decode.seen[0].ended.is_set()  # The head is there long before the first token.
        rig.prefill.open_gate(Gate.PREFILL)
        await commented(rig, 4)
        rig.decode.open_gate(Gate.SECOND_TOKEN)
        texts = [part.choices[0].delta.content or "" async for part in stream]
        assert "".join(texts) == "".join(rig.decode.tokens)
        rig.decode.close_gate(Gate.RESERVE)
        stream = await sdk.chat.completions.create(model="m", messages=TALK["messages"], stream=True)
        rig.decode.hang_up_on_all()
        with pytest.raises(openai.APIError, match="did not answer to the end"):
            await anext(aiter(stream))


async def test_anthropics_sdk_reads_past_comments_and_raises_what_is_told_behind_them() -> None:
    import anthropic  # 2 s, which each worker of a run would take at the top of the file

    async with quick_rig() as rig, anthropic.AsyncAnthropic(base_url=rig.url, api_key="none", max_retries=0) as sdk:
        rig.prefill.close_gate(Gate.PREFILL)
        rig.decode.close_gate(Gate.SECOND_TOKEN)
        async with sdk.messages.stream(model="m", max_tokens=9, messages=TALK["messages"]) as stream:
            rig.prefill.open_gate(Gate.PREFILL)
            await commented(rig, 4)
            rig.decode.open_gate(Gate.SECOND_TOKEN)
            assert "".join([text async for text in stream.text_stream]) == "".join(rig.decode.tokens)
        rig.decode.close_gate(Gate.RESERVE)
        async with sdk.messages.stream(model="m", max_tokens=9, messages=TALK["messages"]) as stream:
            rig.decode.hang_up_on_all()
            with pytest.raises(anthropic.APIStatusError, match="did not answer to the end"):
                await stream.get_final_message()


async def test_httpx_as_a_plain_client_has_its_status_while_the_prompt_is_prefilled() -> None:
    async with quick_rig() as rig, httpx.AsyncClient() as client:
        rig.prefill.close_gate(Gate.PREFILL)
        async with client.stream("POST", f"{rig.url}{COMPLETIONS}", json=STREAM) as got:
            assert got.status_code == 200
            assert await anext(got.aiter_raw()) == COMMENT
        await rig.decode.seen[0].ended.wait()


def _request(body: object) -> bytes:
    raw = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)
