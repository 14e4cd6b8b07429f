"""Rows of bytes for tests: what a client sends and gets, and what decode sees of it; and what an engine sends.

Those of one finding of the router's review are under its name.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Final, Protocol

from fakes.engine import FakeEngine, Seen
from fakes.faults import Fault
from fakes.http import RawClient
from patience import PATIENCE_S

BODY: Final = b'{"model":"m","prompt":"hi"}'
CHUNKED: Final = b"transfer-encoding: chunked\r\n"
INNER: Final = b"GET /v1/models HTTP/1.1\r\nhost: inner\r\n\r\n"

JAVA: Final = (
    b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 27\r\n"
    b"Host: 127.0.0.1:31000\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/17.0.15\r\ncontent-type: application/json\r\n\r\n" + BODY
)
"""All that the HttpClient of Java 17 sends by default, as it was captured from one."""


def post(*lines: bytes, body: bytes = BODY, target: bytes = b"/v1/completions", version: bytes = b"HTTP/1.1") -> bytes:
    """A request that is fine but for what is given. ``lines``: more header lines."""
    framing = b"" if CHUNKED in lines else b"content-length: %d\r\n" % len(body)
    return b"POST %b %b\r\nhost: a\r\n%b%b\r\n%b" % (target, version, framing, b"".join(lines), body)


def chunks(*parts: bytes, trailers: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailers + b"\r\n"


@dataclass(frozen=True, slots=True)
class Row:
    """One connection. ``statuses``: of all answers on it, in order."""

    sent: bytes
    statuses: tuple[int, ...]
    then_sent: bytes = b""
    """Sent when the router has read the rest."""
    after_answers: int = 0
    """``then_sent`` waits for so many answers."""
    answered: bytes = b""
    """What a pattern finds in the answers."""
    seen: bytes = b""
    """What a pattern finds in the head that decode got; likewise below."""
    unseen: bytes = b""
    num_pages: int = 0
    """Of the answers with 200: these no engine hears of."""


ROWS: Final[dict[str, dict[str, Row]]] = {
    # H2: an upgrade that is offered is ignored (RFC 9110, 7.8).
    "H2": {
        "Java's client offers h2c": Row(
            JAVA, (200,), seen=b"user-agent: Java", unseen=b"upgrade|http2-settings|connection"
        ),
        "Java's client, body in a segment of its own": Row(JAVA[: -len(BODY)], (200,), then_sent=BODY),
        "an upgrade whose body looks like a request": Row(
            post(b"connection: Upgrade\r\n", b"upgrade: h2c\r\n", body=INNER)[: -len(INNER)], (400,), then_sent=INNER
        ),
        "a WebSocket is offered to a page": Row(
            b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"content-length: %d\r\n\r\n" % len(INNER),
            (200,),
            then_sent=INNER,
            num_pages=1,
        ),
        "an upgrade with a chunked body, and another request": Row(
            post(CHUNKED, b"connection: upgrade\r\n", b"upgrade: h2c\r\n", body=chunks(BODY[:9], BODY[9:])) + post(),
            (200, 200),
        ),
        "CONNECT": Row(b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n", (405,)),
    },
    # M7: trailers are dropped (RFC 9110, 6.5.1), and there are not many of them.
    "M7": {
        "a trailer is no header": Row(
            post(
                CHUNKED, b"authorization: gate\r\n", body=chunks(BODY, trailers=b"authorization: trailer\r\nx-a: 1\r\n")
            ),
            (200,),
            seen=b"authorization: gate",
            unseen=b"trailer\r|x-a",
        ),
        "a trailer does not shorten the deadline": Row(
            post(CHUNKED, body=chunks(BODY, trailers=b"x-request-timeout: never\r\n")), (200,)
        ),
        "trailers without end": Row(post(CHUNKED, body=chunks(BODY)[:-2] + b"a: b\r\n" * 20_000), (431,)),
        "one trailer without end": Row(post(CHUNKED, body=chunks(BODY)[:-2] + b"a: " + b"b" * 200_000), (431,)),
        "a chunk extension without end": Row(post(CHUNKED, body=b"1b;" + b"x" * 200_000), (431,)),
    },
    # L1: targets (RFC 9112, 3.2).
    "L1": {
        "absolute form": Row(post(target=b"http://a/v1/completions"), (200,)),
        "absolute form with a query": Row(post(target=b"HTTP://a:80/v1/completions?x=1"), (200,)),
        "absolute form of a page": Row(b"GET http://a/health HTTP/1.1\r\nhost: a\r\n\r\n", (200,), num_pages=1),
        "an escaped letter": Row(post(target=b"/v1/%63ompletions"), (200,)),
        "a fragment": Row(post(target=b"/v1/completions#f"), (200,)),
    },
    # L2: what cannot be read is told so, also when the head was fine.
    "L2": {
        "a bad chunk": Row(post(CHUNKED, body=b"zz\r\n"), (400,)),
        "a chunk that is too long": Row(post(CHUNKED, body=b"5\r\n" + BODY), (400,)),
        "a transfer encoding that is none": Row(
            post(b"transfer-encoding: identity\r\n").replace(b"content-length: 27\r\n", b""), (400,)
        ),
        "a transfer encoding that is unknown": Row(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n", (400,)
        ),
        "a bad chunk for a page": Row(
            b"POST /pdcluster/verify HTTP/1.1\r\nhost: a\r\n" + CHUNKED + b"\r\nzz\r\n", (400,)
        ),
    },
    # L3: heads that must be refused (RFC 9112, 3.2; RFC 9110, 10.1.1).
    "L3": {
        "no Host": Row(post().replace(b"host: a\r\n", b""), (400,)),
        "no Host in HTTP/1.0": Row(post(version=b"HTTP/1.0").replace(b"host: a\r\n", b""), (200,)),
        "two Hosts": Row(post(b"host: b\r\n"), (400,)),
        "no Host for a page": Row(b"GET /health HTTP/1.1\r\n\r\n", (400,)),
        "an expectation that is unknown": Row(post(b"expect: foo\r\n"), (417,)),
        "HTTP/0.9": Row(b"GET /health\r\n\r\n", (400,)),
    },
    # L4: what Connection names is about the connection only (RFC 9110, 7.6.1).
    "L4": {
        "a header for one hop": Row(
            post(b"connection: keep-alive, X-Hop\r\n", b"x-hop: 1\r\n", b"x-far: 2\r\n"),
            (200,),
            seen=b"x-far",
            unseen=b"x-hop",
        ),
        "two Connection headers": Row(
            post(b"connection: x-a\r\n", b"connection: x-b\r\n", b"x-a: 1\r\n", b"x-b: 1\r\n"),
            (200,),
            unseen=b"x-a|x-b",
        ),
    },
    # L5: request ids.
    "L5": {
        "an id is passed on and given back": Row(
            post(b"x-request-id: mine-1\r\n"),
            (200,),
            answered=b"x-request-id: mine-1\r",
            seen=b"x-request-id: mine-1\r",
        ),
        "who sends no id gets one": Row(
            post(), (200,), answered=rb"x-request-id: \w{32}\r", seen=rb"x-request-id: \w{32}\r"
        ),
        "an id of 30 KB is replaced": Row(
            post(b"x-request-id: " + b"a" * 30_000 + b"\r\n"),
            (200,),
            answered=rb"x-request-id: \w{32}\r",
            unseen=b"aaaaa",
        ),
        "an id with blanks is replaced": Row(
            post(b"x-request-id: a b\r\n"), (200,), answered=rb"x-request-id: \w{32}\r", unseen=b"a b"
        ),
        "two ids are replaced": Row(
            post(b"x-request-id: one\r\n", b"x-request-id: two\r\n"),
            (200,),
            answered=rb"x-request-id: \w{32}\r",
            unseen=b"one|two",
        ),
        "our own errors have the id": Row(
            post(b"x-request-id: mine-2\r\n", body=b"{"), (400,), answered=b"x-request-id: mine-2\r"
        ),
    },
    "L11": {
        "our own errors have a date": Row(post(body=b"{"), (400,), answered=b"date: .* GMT\r"),
        "HEAD of the models": Row(b"HEAD /v1/models HTTP/1.1\r\nhost: a\r\n\r\n", (200,), num_pages=1),
    },
}


OK: Final = b"HTTP/1.1 200 OK\r\n"
PLAIN: Final = b"content-type: application/json\r\n"
STREAM: Final = b"content-type: text/event-stream\r\n"
ERROR: Final = b'data: {"error": {"message": "no", "code": 400}}\n\n'


def answer(body: bytes, *lines: bytes, kind: bytes = PLAIN) -> bytes:
    framing = b"" if CHUNKED in lines else b"content-length: %d\r\n" % len(body)
    return OK + kind + framing + b"".join(lines) + b"\r\n" + body


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One answer of decode's, and what the client gets of it."""

    sent: bytes
    status: int
    found: bytes = b""
    not_found: bytes = b""


ENGINE_ROWS: Final[dict[str, dict[str, EngineRow]]] = {
    "M7": {
        "a trailer is no header": EngineRow(
            answer(chunks(b"{}", trailers=b"x-a: 1\r\nx-b: 2\r\n"), CHUNKED), 200, not_found=b"x-a|x-b"
        ),
    },
    "L4": {
        "a header for one hop": EngineRow(
            answer(b"{}", b"connection: x-hop\r\n", b"x-hop: 1\r\n", b"x-far: 2\r\n"), 200, b"x-far", b"x-hop"
        ),
    },
    "L5": {
        "an id of the engine's own": EngineRow(
            answer(b"{}", b"x-request-id: theirs\r\n"), 200, b"x-request-id: mine\r", b"theirs"
        ),
    },
    "L8": {
        "a stream in capitals that begins with an error": EngineRow(
            answer(ERROR, kind=b"content-type: Text/Event-Stream\r\n"), 400
        ),
        "a comment before the error": EngineRow(answer(b": ping\n\n" + ERROR, kind=STREAM), 400),
        "two comments in pieces before the error": EngineRow(
            answer(chunks(b": pi", b"ng\r\n", b"\r\n:\n\n", ERROR), CHUNKED, kind=STREAM), 400
        ),
        "a comment before an event": EngineRow(
            answer(b": ping\n\ndata: {}\n\n", kind=STREAM), 200, b": ping\n\ndata: {}"
        ),
        "a status below 100": EngineRow(answer(b"{}").replace(b"200", b"099"), 502),
        "bytes after a whole answer": EngineRow(answer(b'{"a": 1}') + b"garbage", 200, b'{"a": 1}'),
    },
}


class Behind(Protocol):
    """A router that clients reach, and its decode engine."""

    @property
    def decode(self) -> FakeEngine: ...

    async def client(self) -> RawClient: ...


async def exchange(router: Behind, row: Row) -> bytes:
    """All that comes until the connection closes or falls silent with an answer for each status."""
    client = await router.client()
    await client.send(row.sent)
    answers = await read_answers(client, row.after_answers)
    if row.then_sent:
        await asyncio.sleep(0.05)
        await client.send(row.then_sent)
    wanted = len(row.statuses) - row.after_answers
    answers += await read_answers(client, wanted)
    if len(statuses_in(answers)) < len(row.statuses):
        return answers
    try:
        async with asyncio.timeout(0.15):  # An answer too many would come at once.
            return answers + await client.reader.read(1 << 16)
    except TimeoutError:
        return answers


async def read_answers(client: RawClient, number: int) -> bytes:
    """All that comes until so many more answers have begun, or the connection closes."""
    answers = b""
    async with asyncio.timeout(PATIENCE_S):
        while len(statuses_in(answers)) < number and (part := await client.reader.read(1 << 16)):
            answers += part
    return answers


def statuses_in(answers: bytes) -> tuple[int, ...]:
    return tuple(int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers))


def head_of(seen: Seen) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in seen.message.headers.items()).encode("latin-1")


async def send_row(router: Behind, row: Row) -> None:
    """One connection, and what must come of it."""
    num_before = len(router.decode.seen)
    answers = await exchange(router, row)
    assert statuses_in(answers) == row.statuses
    assert re.search(row.answered, answers), answers[:2000]
    heads = [head_of(seen) for seen in router.decode.seen[num_before:]]
    assert len(heads) == row.statuses.count(200) - row.num_pages
    for head in heads:
        assert re.search(row.seen, head), head
        assert not (row.unseen and re.search(row.unseen, head)), head


async def send_engine_row(router: Behind, row: EngineRow) -> None:
    """Decode answers so twice: the first answer spoils nothing for the second."""
    router.decode.fault, router.decode.raw = Fault.RAW, row.sent
    for _ in range(2):
        answers = await exchange(router, Row(post(b"x-request-id: mine\r\n"), (row.status,)))
        assert statuses_in(answers) == (row.status,)
        assert re.search(row.found, answers), answers[:2000]
        assert not (row.not_found and re.search(row.not_found, answers)), answers[:2000]
