"""Large reads and writes of a connection with TLS come in pieces; the socket is a fake."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from fakes.certificates import Authority
from fakes.hellos import claim, records
from pdcluster_router.core.clients.room import Room, RoomLimit, Unread
from pdcluster_router.files.pem import KeyPair
from pdcluster_router.front.certificates import CLIENT_PORT, load_certificate
from pdcluster_router.http.handshakes import SLICE_S, Handshakes, TlsPort
from pdcluster_router.http.records import (
    COSTLY_PIECE_BYTES,
    MAX_HANDSHAKE_BYTES,
    NUM_WRITTEN_BYTES,
    PIECE_BYTES,
    RECORD_BYTES,
)
from pdcluster_router.http.tls import TlsConnection

pytestmark = pytest.mark.anyio
ROOM = Room(1 << 30)


def take_a_turn() -> None:
    """All that one turn may."""
    ends_at = time.monotonic() + SLICE_S
    while time.monotonic() <= ends_at:
        pass


class Plain:
    """What the loop gives a connection: it keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.num_written = 0
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.num_written += len(data)

    def taken(self) -> bytes:
        """All that is written, which goes to the client."""
        taken, self.written = b"".join(self.written), []
        return taken

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def write_eof(self) -> None: ...

    def get_extra_info(self, _: str) -> None: ...

    def abort(self) -> None:
        self.is_aborted = True


class Reader(asyncio.Protocol):
    """The protocol above: it takes all that one turn may for each piece, and reads on at once, as ``reading.py``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.num_read = 0
        self.breaks_at = 1 << 30
        """A bug of ours, behind so many bytes."""

    def data_received(self, data: bytes) -> None:
        self.num_read += len(data)
        if self.num_read >= self.breaks_at:
            raise ZeroDivisionError
        take_a_turn()
        self.transport.resume_reading()


class Clients:
    def opened(self, *_: object) -> bool:
        return True

    def closed(self, _: object) -> None: ...


class Costly:
    """OpenSSL, for which the client's records are so much work that a piece takes all that one turn may."""

    def __init__(self, tls: ssl.SSLObject, *_: ssl.MemoryBIO) -> None:
        self._tls = tls

    def read(self, num_bytes: int) -> bytes:
        take_a_turn()
        return self._tls.read(num_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tls, name)


class Endless:
    """OpenSSL, if it wanted more and more of a client."""

    def __init__(self) -> None:
        self.num_read = 0

    def wrap_bio(self, incoming: ssl.MemoryBIO, _: ssl.MemoryBIO, *, server_side: bool) -> Endless:
        self._incoming = incoming
        return self

    def do_handshake(self) -> None:
        self.num_read += len(self._incoming.read())
        raise ssl.SSLWantReadError


class Answering:
    """OpenSSL, for which each of the client's records is one that TLS itself answers, as a KeyUpdate."""

    def __init__(self, tls: ssl.SSLObject, _: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> None:
        self._tls, self._outgoing = tls, outgoing

    def read(self, num_bytes: int) -> bytes:
        self._outgoing.write(bytes(27))
        return self._tls.read(num_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tls, name)


class Context:
    def __init__(self, context: ssl.SSLContext, wrapped: Callable[..., Any]) -> None:
        self._context, self._wrapped = context, wrapped

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *, server_side: bool) -> Any:
        return self._wrapped(self._context.wrap_bio(incoming, outgoing, server_side=server_side), incoming, outgoing)


def port(context: Any, reader: Reader, on_refused: Callable[[str], None]) -> TlsPort:
    """A port with one connection, whose protocol above is ``reader``. Handshakes wait for no turn."""
    return TlsPort(
        context=lambda: context,
        new_protocol=lambda: reader,
        handshakes=Handshakes(lambda step: step()).row(),
        shaking=set(),
        clients=cast("Any", Clients()),
        on_refused=on_refused,
        http_answer=b"",
        new_unread=lambda _: Unread(ROOM, RoomLimit.CLIENTS),
        on_no_room=lambda: on_refused("no room"),
        handshake_timeout_s=60,
        linger_s=1,
    )


class Open:
    """A connection with an agreement, and its client."""

    def __init__(self, folder: Path, wrapped: Callable[..., Any] | None = None) -> None:
        """``wrapped``: makes what takes OpenSSL's place from OpenSSL and its two buffers."""
        authority = Authority(folder / "ca.crt")
        files = authority.issue().write(folder)
        context = load_certificate(KeyPair(files["tls_cert"], files["tls_key"], *CLIENT_PORT, "clients")).context
        self.reader, self.plain = Reader(), Plain()
        shown = context if wrapped is None else Context(context, wrapped)
        self.router_end = TlsConnection(port(shown, self.reader, pytest.fail))
        self.router_end.connection_made(cast("Any", self.plain))
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        trusting = ssl.create_default_context(cafile=str(authority.ca))
        self.client = trusting.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        with pytest.raises(ssl.SSLWantReadError):
            self.client.do_handshake()
        self.send()
        self._incoming.write(self.plain.taken())
        self.client.do_handshake()
        self.send()

    def send(self) -> None:
        self.router_end.data_received(self._outgoing.read())

    def received(self) -> bytes:
        """All that is written, as the client sees it."""
        self._incoming.write(self.plain.taken())
        received = bytearray()
        with suppress(ssl.SSLWantReadError):
            while part := self.client.read(RECORD_BYTES):
                received += part
        return bytes(received)


async def most_read_in_a_turn(open_: Open, num_bytes: int) -> int:
    """Bytes for the protocol above, of which ``num_bytes`` are still to come."""
    read = [open_.reader.num_read]
    while read[-1] < read[0] + num_bytes:
        await asyncio.sleep(0)
        read.append(open_.reader.num_read)
    return max(after - before for before, after in itertools.pairwise(read))


async def test_a_handshake_without_end_ends() -> None:
    refused: list[str] = []
    endless = Endless()
    connection = TlsConnection(port(endless, Reader(), refused.append))
    connection.connection_made(cast("Any", Plain()))
    connection.data_received(records(claim(100) + bytes(100)))
    for _ in range(100):
        connection.data_received(bytes(PIECE_BYTES))
    assert refused == ["handshake too long"]
    assert MAX_HANDSHAKE_BYTES < endless.num_read <= MAX_HANDSHAKE_BYTES + PIECE_BYTES


async def test_openssl_has_nothing_of_a_hello_that_claims_too_much() -> None:
    refused: list[str] = []
    endless = Endless()
    plain = Plain()
    connection = TlsConnection(port(endless, Reader(), refused.append))
    connection.connection_made(cast("Any", plain))
    for byte in records(claim(1 << 17), 1):
        connection.data_received(bytes([byte]))
    assert endless.num_read < len(records(claim(1 << 17), 1))
    assert refused == ["a ClientHello of 131072 bytes, 16384 are allowed"]
    assert plain.taken() == b"\x15\x03\x03\x00\x02\x02\x2f"


async def test_a_turn_of_the_loop_decrypts_no_more_than_fits_into_it(tmp_path: Path) -> None:
    open_ = Open(tmp_path)
    open_.client.write(b"x" * PIECE_BYTES * 12)
    open_.send()
    assert await most_read_in_a_turn(open_, PIECE_BYTES * 12 - open_.reader.num_read) <= PIECE_BYTES


async def test_a_client_whose_records_take_long_is_read_in_smaller_pieces(tmp_path: Path) -> None:
    open_ = Open(tmp_path, Costly)
    open_.client.write(b"x")
    open_.send()
    for _ in range(40):
        open_.client.write(b"x" * 100)
    open_.send()
    assert open_.reader.num_read <= COSTLY_PIECE_BYTES
    assert await most_read_in_a_turn(open_, 4001 - open_.reader.num_read) <= COSTLY_PIECE_BYTES


async def test_a_large_answer_is_encrypted_record_by_record(tmp_path: Path) -> None:
    """OpenSSL's buffer keeps its room: an idle client would cost as much as the largest answer that it ever had."""
    open_ = Open(tmp_path)
    assert open_.received() == b""
    open_.router_end.write(b"x" * RECORD_BYTES * 20)
    assert len(open_.plain.written) == 20
    assert open_.received() == b"x" * RECORD_BYTES * 20


async def test_written_bytes_are_those_of_the_protocol_above_and_all_before_them(tmp_path: Path) -> None:
    """An engine whose kernel lacks some of them has not read the request. TLS' own words behind them prove nothing."""
    open_ = Open(tmp_path, Answering)
    written = open_.plain.num_written
    open_.router_end.write(b"x" * RECORD_BYTES * 2)
    of_request = open_.plain.num_written
    assert of_request > written + RECORD_BYTES * 2
    open_.client.write(b"y")
    open_.send()
    assert open_.plain.num_written > of_request
    assert open_.router_end.get_extra_info(NUM_WRITTEN_BYTES) == of_request


async def test_a_bug_behind_a_large_read_ends_the_connection(tmp_path: Path) -> None:
    """It is not read meanwhile, so nothing else would."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    open_ = Open(tmp_path)
    open_.reader.breaks_at = PIECE_BYTES * 2
    open_.client.write(b"x" * PIECE_BYTES * 4)
    open_.send()
    while not problems:
        await asyncio.sleep(0)
    assert [type(problem["exception"]) for problem in problems] == [ZeroDivisionError]
    assert open_.plain.is_aborted
