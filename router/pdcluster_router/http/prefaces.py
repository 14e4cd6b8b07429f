"""A connection of the client port until its PROXY header is whole, which tells the client's address.

    no trusted peer --> reported, closed
    WAITING --a whole header--> handed over to the protocol above, with what came behind it
       +--no header, too long, too slow, left--> reported once if a byte has come, closed

``core/clients/proxy_protocol.py`` decides what a header looks like. Once the header is whole, nothing of the connection
is kept here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.utils import get_remote_addr

from pdcluster_router.core.clients.proxy_protocol import BadPreface, Preface, read_preface
from pdcluster_router.http.handshakes import Counting


@dataclass(frozen=True, slots=True)
class PrefacePort:
    """The common part of all connections of one port."""

    trusts: Callable[[str], bool]
    """Whether a peer's address is a trusted proxy's."""
    new_protocol: Callable[[Preface], asyncio.Protocol]
    """Makes the protocol above, once there is a header."""
    waiting: set[Any]
    """The connections that have no protocol yet: uvicorn's own set, which uvicorn closes at its end."""
    clients: Counting
    on_refused: Callable[[str], None]
    """Called once with the reason why there is no header."""
    timeout_s: float


class PrefacedConnection(asyncio.Protocol):
    """One connection. Event loop only."""

    def __init__(self, port: PrefacePort) -> None:
        self._port = port
        self._data = b""
        self._is_over = False
        """The connection was refused, or another protocol has it."""
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None

    # What the event loop says.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._transport = transport
        self._port.waiting.add(self)
        peer = get_remote_addr(transport)
        self._port.clients.opened(self, peer[0] if peer else "")
        if peer is None:  # It has left already.
            self.abort()
        elif not self._port.trusts(peer[0]):
            self._refuse("it comes from an address that is not in --trusted-proxies")
        else:
            self._timer = asyncio.get_running_loop().call_later(self._port.timeout_s, self._takes_too_long)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._data += data
        try:
            preface = read_preface(self._data)
        except BadPreface as bad:
            self._refuse(str(bad))
            return
        if preface is not None:
            self._hand_over(preface)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self._data and not self._is_over:
            self._port.on_refused("it left before its PROXY header was whole")
        self._is_over = True
        self._leave()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._is_over = True
        self._transport.abort()

    def shutdown(self) -> None:
        """Closes a connection without a protocol. uvicorn calls it when the router ends."""
        self.abort()

    def _hand_over(self, preface: Preface) -> None:
        self._is_over = True
        self._leave()
        rest, self._data = self._data[preface.num_bytes :], b""
        above = self._port.new_protocol(preface)
        self._transport.set_protocol(above)
        above.connection_made(self._transport)
        if rest and not self._transport.is_closing():
            above.data_received(rest)

    def _refuse(self, reason: str) -> None:
        self._port.on_refused(reason)
        self.abort()

    def _takes_too_long(self) -> None:
        """A connection that has sent no byte is closed without a report: load balancers probe so."""
        if self._data:
            self._refuse(f"no whole PROXY header within {self._port.timeout_s:g} s")
        else:
            self.abort()

    def _leave(self) -> None:
        """The connection does not count or wait here any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self in self._port.waiting:
            self._port.waiting.discard(self)
            self._port.clients.closed(self)
