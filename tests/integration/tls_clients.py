"""Clients of a router's port with TLS, for its tests."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Any

import pytest

from fakes.certificates import Authority, Issued
from fakes.http import RawClient
from fakes.router import Rig
from patience import PATIENCE_S


def trusting(authority: Authority, **versions: Any) -> ssl.SSLContext:
    """A client's context."""
    context = ssl.create_default_context(cafile=str(authority.ca))
    for name, value in versions.items():
        setattr(context, name, value)
    return context


def port_of(rig: Rig) -> int:
    return rig.router.settings.port


async def connect(rig: Rig, context: ssl.SSLContext | None) -> RawClient:
    """A client of the client port; without a context it speaks no TLS."""
    client = RawClient(*await asyncio.open_connection("127.0.0.1", port_of(rig), ssl=context))
    rig.clients.append(client)
    return client


async def shown(rig: Rig, authority: Authority) -> bytes:
    """The certificate that a new client is shown."""
    client = await connect(rig, trusting(authority))
    found: bytes = client.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    client.leave()
    return found


def der_of(issued: Issued) -> bytes:
    return ssl.PEM_cert_to_DER_cert(issued.pem.decode())


async def ended(reader: asyncio.StreamReader) -> None:
    """The router has closed the connection, in order or not."""
    with suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            while await reader.read(1 << 16):
                pass


def hello(authority: Authority) -> bytes:
    """A client's first message."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        trusting(authority).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()


class ByHand:
    """A client that decides which bytes are sent together."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, authority: Authority) -> None:
        self.reader, self.writer = reader, writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trusting(authority).wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")

    @classmethod
    async def agree(cls, rig: Rig, authority: Authority) -> ByHand:
        """There is an agreement, of which the router does not know yet: ``send`` brings the last word of it too."""
        client = cls(*await asyncio.open_connection("127.0.0.1", port_of(rig)), authority)
        while True:
            try:
                client._tls.do_handshake()
            except ssl.SSLWantReadError:
                client.send()
                client._incoming.write(await client.reader.read(1 << 16))
            else:
                return client

    def send(self, said: bytes = b"", *, behind: bytes = b"") -> None:
        """``behind``: as it is, in the same write."""
        if said:
            self._tls.write(said)
        self.writer.write(self._outgoing.read() + behind)
