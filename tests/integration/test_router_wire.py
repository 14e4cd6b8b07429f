"""What goes over the wire, byte by byte: a client's requests in a row, and what engines answer."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from fakes.faults import Fault
from fakes.router import COMPLETIONS, Rig, running_rig
from integration import wire_rows
from integration.wire_rows import BODY, CHUNKED, EngineRow, Row, answer, chunks, post, send_engine_row, send_row
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

ROWS: Final = {
    # Once more, so that the cures break nothing.
    "two requests and a page": Row(
        post() + b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" + post(), (200, 200, 200), num_pages=1
    ),
    # One request, one answer, in order: what cannot be served takes no answer from what came before it.
    "garbage behind a request": Row(post() + b"\x00garbage\r\n\r\n", (200, 400)),
    "garbage behind two requests": Row(post() + post() + b"\x00garbage\r\n\r\n", (200, 200, 400)),
    "garbage behind a page": Row(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n\x00\r\n\r\n", (200, 400), num_pages=1),
    "no Host behind a request": Row(post() + post().replace(b"host: a\r\n", b""), (200, 400)),
    "a bad chunk behind a request": Row(post() + post(CHUNKED, body=b"zz\r\n"), (200, 400)),
    "a bad chunk for a page behind a request": Row(
        post() + b"POST /health HTTP/1.1\r\nhost: a\r\n" + CHUNKED + b"\r\nzz\r\n", (200, 400)
    ),
    "trailers without end behind a request": Row(
        post() + post(CHUNKED, body=chunks(BODY)[:-2] + b"a: b\r\n" * 20_000), (200, 431)
    ),
    "a bad chunk behind a whole request, later": Row(
        post(), (200, 400), then_sent=post(CHUNKED, body=b"zz\r\n"), after_answers=1
    ),
    "a bad chunk for a page that has answered already": Row(
        b"POST /health HTTP/1.1\r\nhost: a\r\n" + CHUNKED + b"\r\n", (405,), then_sent=b"zz\r\n", after_answers=1
    ),
    "two lengths": Row(post(b"content-length: 5\r\n"), (400,)),
    "a length and chunks": Row(post(b"transfer-encoding: chunked \r\n"), (400,)),
}


@pytest.mark.parametrize("name", ROWS)
async def test_on_the_wire(name: str) -> None:
    async with running_rig() as rig:
        await send_row(rig, ROWS[name])


@pytest.mark.parametrize("finding", wire_rows.ROWS)
async def test_what_a_review_has_sent(finding: str) -> None:
    """All rows of one finding to one router: none spoils the next."""
    async with running_rig() as rig:
        for row in wire_rows.ROWS[finding].values():
            await send_row(rig, row)


BOM: Final = b"\xef\xbb\xbf"
SEED: Final = b'{"prompt":"hi","seed":%d,"tools":[{"x":100000000000000000000000}]}' % 2**70


@pytest.mark.parametrize(
    "body",
    [BOM + b'{"prompt":"hi"}', SEED, b'{"prompt":"hi","x":%b}' % (b"[" * 200 + b"]" * 200)],
    ids=["a byte order mark", "numbers beyond 64 bits", "200 levels"],
)
async def test_odd_json_reaches_decode_byte_for_byte(rig: Rig, body: bytes) -> None:
    assert (await (await rig.client()).post(COMPLETIONS, body)).status == 200
    sent = body.removeprefix(BOM).removesuffix(b"}")
    assert rig.decode.seen[-1].message.body.removeprefix(BOM).startswith(sent)


async def test_json_that_is_too_deep_is_a_400(rig: Rig) -> None:
    deep = b'{"prompt":%b}' % (b"[" * 100_000 + b"]" * 100_000)
    assert (await (await rig.client()).post(COMPLETIONS, deep)).status == 400


async def test_a_stream_that_breaks_off_in_http_1_0_ends_with_an_error_event_and_a_reset(rig: Rig) -> None:
    """Nothing else tells such a client that it is not whole."""
    rig.decode.fault = Fault.DIE_MID_STREAM
    client = await rig.client()
    await client.send(post(body=b'{"prompt":"hi","stream":true}', version=b"HTTP/1.0"))
    came, is_reset = b"", False
    try:
        async with asyncio.timeout(PATIENCE_S):
            while part := await client.reader.read(1 << 16):
                came += part
    except ConnectionResetError:
        is_reset = True
    assert (b'data: {"error"' in came, is_reset) == (True, True)


# What an engine sends.

ENGINE_ROWS: Final = {
    "when to come back": EngineRow(
        answer(b"{}", b"retry-after: 7\r\n", b"x-other: 1\r\n").replace(b"200 OK", b"503 X"),
        503,
        b"retry-after: 7\r",
        b"x-ot",
    ),
    "which key to show": EngineRow(
        answer(b"{}", b"www-authenticate: Bearer\r\n").replace(b"200 OK", b"401 X"), 401, b"www-authenticate: Bearer\r"
    ),
    "70 kB of headers": EngineRow(answer(b"{}", *[b"x-a: %b\r\n" % (b"a" * 1000)] * 70), 502),
    "60 kB of headers and as much body": EngineRow(
        answer(b"{%b}" % (b" " * 60_000), *[b"x-a: %b\r\n" % (b"a" * 1000)] * 60), 200, b"x-a: aaa"
    ),
}


@pytest.mark.parametrize("name", ENGINE_ROWS)
async def test_from_an_engine(name: str) -> None:
    async with running_rig(max_decode_attempts=1) as rig:
        await send_engine_row(rig, ENGINE_ROWS[name])


@pytest.mark.parametrize("finding", wire_rows.ENGINE_ROWS)
async def test_what_a_review_has_answered_as_an_engine(finding: str) -> None:
    async with running_rig(max_decode_attempts=1) as rig:
        for row in wire_rows.ENGINE_ROWS[finding].values():
            await send_engine_row(rig, row)


@pytest.mark.parametrize("trailers", [b"a: b\r\n" * 20_000, b"a: " + b"b" * 400_000], ids=["many", "one"])
async def test_an_engine_whose_trailers_do_not_end_is_no_clean_end(trailers: bytes) -> None:
    async with running_rig(max_decode_attempts=1) as rig:
        rig.decode.fault, rig.decode.raw = Fault.RAW, answer(chunks(b"{}")[:-2] + trailers, CHUNKED)
        client = await rig.client()
        await client.send(post())
        answered = await asyncio.wait_for(client.receive(), PATIENCE_S)
        assert answered.status == 502 or not answered.is_whole
