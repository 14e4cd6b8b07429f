"""What may come over a client's connection, byte by byte: requests of all forms, spoiled ones, and no requests at all.

``num_answers`` is how many answers an input can get at most. One whose framing is right has as many as it has requests,
whatever its bodies look like: an answer more would be a request that was made of a body.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from fuzz.bodies import bodies, client_bodies
from fuzz.mutations import noise, spoil_bytes
from pdcluster_router.http.cycle import MAX_KEYS

PATHS: Final = ("/v1/completions",) * 6 + ("/v1/chat/completions",) * 3 + (
    "/v1/models", "/health", "/docs", "/v1/nothing", "http://a/v1/completions", "/v1/%63ompletions", "*", "", "//",
    "/%ff", "/v1/completions?a=b#c", "/v1/metaserver", "/pdcluster/verify",
)  # fmt: skip
INTERNAL_PATHS: Final = ("/v1/metaserver",) * 6 + (
    "/metrics",
    "/",
    "/health",
    "/pdcluster/pool",
    "/pdcluster/requests?id=R",
    "/pdcluster/verify",
)
METHODS: Final = ("POST",) * 12 + ("GET", "HEAD", "PUT", "OPTIONS", "CONNECT", "PRI", "post", "M-SEARCH")
LINES: Final = (
    b"connection: close", b"connection: keep-alive, x-hop", b"connection: upgrade\r\nupgrade: h2c", b"x-hop: 1",
    b"expect: 100-continue", b"expect: foo", b"authorization: Bearer x", b"x-request-id: mine", b"x-request-timeout: 5",
    b"x-request-id: \xff\xfe", b"content-type: text/plain", b"host: b", b"transfer-encoding: identity",
    b"content-length: 3", b"content-length: -1", b"content-length: 99999999999999999999", b"te: trailers", b" folded",
    b"no colon", b": no name", b"na me: x", b"x: a\rb", b"x: \x00", b"cookie: " + b"a=b; " * 50,
    b"x-pdcluster-seal: " + b"0" * 32, b"upgrade: websocket", b"content-encoding: gzip",
)  # fmt: skip
ALIENS: Final = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x01" * 64, b"\r\n" * 30,
    b"GET /health\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"*1\r\n$4\r\nPING\r\n", b"\x05\x01\x00", b"\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"GET  / HTTP/1.1\r\n\r\n",
)  # fmt: skip
VALUES: Final = (
    b"{},", b"[],", b"1,", b'"",', b"null,", b'"\\u00e9",', b"1e5,", b"[1],", b"[[[1]]],", b'{"":1},', b"123456, ",
)  # fmt: skip
TEXTS: Final = (b"x", b"e", b"o", b"4", "é".encode(), b"\\n", b"at 12:30, ", b" ")
"""Some of them are of letters that slow a search for the words of media."""
LARGE: Final = (
    ("/v1/completions", b'{"prompt":[', VALUES, b"1]}"),
    ("/v1/completions", b'{"prompt":[[', VALUES, b"1]]}"),
    ("/v1/completions", b'{"prompt":[', (b" ",), b'"x"]}'),
    ("/v1/completions", b"{", (b" ",), b'"prompt":"x"}'),
    ("/v1/completions", b'{"prompt":["', TEXTS, b'"]}'),
    ("/v1/completions", b'{"a":[', VALUES, b"1]}"),
    ("/v1/completions", b"{" + b'"n":1,' * (MAX_KEYS - 1) + b'"a":[', (b"[1],",), b"1]}"),
    ("/v1/completions", b'{"stream":[', VALUES, b"1]}"),
    ("/v1/completions", b'{"vllm_xargs":{"a":[', VALUES, b"1]}}"),
    ("/v1/chat/completions", b'{"messages":[', VALUES, b"1]}"),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"', TEXTS, b'"}]}'),
    ("/v1/chat/completions", b'{"messages":[', (b'{"data":"' + b"x" * 4002 + b'"},',), b"1]}"),
    ("/v1/messages", b'{"tool_choice":{"a":[', VALUES, b'1],"type":"tool"}}'),
)
"""Path, how a body begins, what it repeats, one of these, and how it ends. Each was slow once, or may be."""
LARGE_BYTES: Final = 8 << 20
INNER: Final = b"GET /v1/models HTTP/1.1\r\nhost: inner\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Input:
    """One connection."""

    parts: tuple[bytes, ...]
    """Written one after the other."""
    is_internal: bool
    """Whether it goes to the port for engines, the operator and monitoring."""
    num_answers: int
    is_whole: bool = False
    """Whether it has exactly so many answers."""
    leaves: bool = False
    """Whether the client cuts the connection when it has written all."""


def inputs(rng: random.Random) -> Iterator[Input]:
    """Without end."""
    while True:
        leaves = rng.random() < 0.15
        if rng.random() < 0.15:
            num = rng.randint(1, 4)
            raw = b"".join(_well_framed(rng) for _ in range(num))
            yield Input(_parts(rng, raw), False, num, is_whole=not leaves, leaves=leaves)
        else:
            raw, num, is_internal = _one(rng)
            yield Input(_parts(rng, raw), is_internal, num, leaves=leaves)


def large_input(rng: random.Random) -> Input:
    """A body of the largest size, made to be slow. Each costs as much as thousands of others: only now and then."""
    path, opening, units, ending = rng.choice(LARGE)
    unit = rng.choice(units)
    raw = large_request(path, opening, unit, ending)
    return Input((raw,), False, 1, is_whole=True)


def large_request(path: str, opening: bytes, unit: bytes, ending: bytes) -> bytes:
    """With as many units as a body may have."""
    num_units = (LARGE_BYTES - len(opening) - len(ending)) // len(unit)
    return _request("POST", path, opening + unit * num_units + ending)


def _one(rng: random.Random) -> tuple[bytes, int, bool]:
    """Bytes that may be anything, how many answers they can have, and whether they are for the internal port."""
    kind = rng.randrange(34)
    if kind == 0:
        return noise(rng), 1, rng.random() < 0.3
    if kind == 1:
        return rng.choice(ALIENS) + rng.choice((b"", INNER)), 2, rng.random() < 0.3
    if kind == 2:
        return _large_head(rng), 1, rng.random() < 0.2
    if kind < 9:
        return _spoiled(rng, _any(rng, INTERNAL_PATHS, bodies(rng)), 0.7, is_internal=True)
    raw = b"".join(_any(rng, PATHS, client_bodies(rng)) for _ in range(rng.choice((1, 1, 1, 2, 5))))
    return _spoiled(rng, raw, 0.5, is_internal=False)


def _spoiled(rng: random.Random, raw: bytes, share: float, *, is_internal: bool) -> tuple[bytes, int, bool]:
    raw = spoil_bytes(rng, raw) if rng.random() < share else raw
    return raw, raw.count(b"\n") + 1, is_internal


def _well_framed(rng: random.Random) -> bytes:
    """A request whose end is sure, and whose body may look like others."""
    body = rng.choice((b"", b'{"prompt":"')) + INNER * rng.randint(1, 3) + rng.choice((b"", b'"}', b"0\r\n\r\n"))
    lines = rng.choice(((), (b"connection: upgrade\r\nupgrade: h2c",), (b"connection: keep-alive",)))
    return _request("POST", "/v1/completions", body, *lines, chunks=_chunks(rng, body) if rng.random() < 0.3 else None)


def _any(rng: random.Random, paths: tuple[str, ...], body: bytes) -> bytes:
    lines = [rng.choice(LINES) for _ in range(rng.choice((0, 0, 1, 2, 5)))]
    version = rng.choice(("1.1",) * 19 + ("1.0",))
    chunks = _chunks(rng, body) if rng.random() < 0.3 else None
    return _request(rng.choice(METHODS), rng.choice(paths), body, *lines, version=version, chunks=chunks)


def _request(
    method: str, path: str, body: bytes, *lines: bytes, version: str = "1.1", chunks: bytes | None = None
) -> bytes:
    """``chunks``: the body, as it is sent."""
    framing = b"content-length: %d" % len(body) if chunks is None else b"transfer-encoding: chunked"
    head = [f"{method} {path} HTTP/{version}".encode(), b"host: a", framing, *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + (body if chunks is None else chunks)


def _chunks(rng: random.Random, body: bytes) -> bytes:
    size = rng.choice((1, 2, 7, 100, 1 << 20))
    parts = [body[begin : begin + size] for begin in range(0, len(body), size)]
    extension = rng.choice((b"", b"", b";a=b"))
    trailers = rng.choice((b"", b"", b"authorization: trailer\r\n", b"x: y\r\n" * 20))
    return b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n" + trailers + b"\r\n"


def _large_head(rng: random.Random) -> bytes:
    """Up to twice what a head may be, in few lines or many, with an end or without."""
    num = rng.choice((1_000, 20_000, 65_000, 130_000))
    lines = rng.choice((b"x: " + b"y" * num + b"\r\n", b"a: b\r\n" * (num // 6), b"a:\r\n" * (num // 4)))
    return b"GET /health HTTP/1.1\r\nhost: a\r\n" + lines + rng.choice((b"\r\n", b"", b"\r"))


def _parts(rng: random.Random, raw: bytes) -> tuple[bytes, ...]:
    cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.choice((0, 0, 0, 1, 3))))
    bounds = [0, *cuts, len(raw)]
    return tuple(raw[begin:end] for begin, end in pairwise(bounds) if begin < end)
