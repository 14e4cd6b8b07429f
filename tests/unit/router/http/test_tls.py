"""Large reads are decrypted a few pieces in each turn of the loop; the socket is a fake."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from pathlib import Path
from typing import Any, cast

import pytest

from fakes.certificates import Authority
from pdcluster_router.front.certificates import load_certificate
from pdcluster_router.http.handshakes import SLICE_S, Handshakes, TlsPort
from pdcluster_router.http.tls import PIECE_BYTES, TlsConnection

pytestmark = pytest.mark.anyio


class Plain:
    """What the loop gives a connection: it keeps what is written."""

    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Reader(asyncio.Protocol):
    """The protocol above: it takes all that one turn may for each piece, and reads on at once, as ``reading.py``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.num_read = 0

    def data_received(self, data: bytes) -> None:
        self.num_read += len(data)
        ends_at = time.monotonic() + SLICE_S
        while time.monotonic() < ends_at:
            pass
        self.transport.resume_reading()


class Clients:
    def opened(self, _: object) -> bool:
        return True

    def closed(self, _: object) -> None: ...


class Open:
    """A connection with an agreement, and its client."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder / "ca.crt")
        files = authority.issue().write(folder)
        context, _ = load_certificate(files["tls_cert"], files["tls_key"])
        self.reader, self.plain = Reader(), Plain()
        port = TlsPort(
            context=lambda: context,
            new_protocol=lambda: self.reader,
            handshakes=Handshakes(lambda step: step()),
            shaking=set(),
            clients=cast("Any", Clients()),
            on_refused=pytest.fail,
            http_answer=b"",
            handshake_timeout_s=60,
            linger_s=1,
        )
        self.router_end = TlsConnection(port)
        self.router_end.connection_made(cast("Any", self.plain))
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        trusting = ssl.create_default_context(cafile=str(authority.ca))
        self.client = trusting.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        with pytest.raises(ssl.SSLWantReadError):
            self.client.do_handshake()
        self.send()
        self._incoming.write(self.plain.written)
        self.client.do_handshake()
        self.send()

    def send(self) -> None:
        self.router_end.data_received(self._outgoing.read())


async def test_a_turn_of_the_loop_decrypts_no_more_than_fits_into_it(tmp_path: Path) -> None:
    open_ = Open(tmp_path)
    open_.client.write(b"x" * PIECE_BYTES * 12)
    open_.send()
    read = [open_.reader.num_read]
    while read[-1] < PIECE_BYTES * 12:
        await asyncio.sleep(0)
        read.append(open_.reader.num_read)
    assert max(after - before for before, after in itertools.pairwise(read)) <= PIECE_BYTES
