"""The turns of TLS handshakes, and the common facts of all connections of a port with TLS.

``tls.py`` and ``engine_tls.py`` carry out the handshake of one connection.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pdcluster_router.core.clients.room import Unread

SLICE_S: Final = 0.002
"""After so many seconds, a turn of the loop begins no further piece or handshake."""


class Abortable(Protocol):
    """A connection as ``Counting`` needs it, so that tests need no socket."""

    def abort(self) -> None:
        """Closes the connection at once."""
        ...


class Shaking(Abortable, Protocol):
    """A connection as ``Handshakes`` needs it, so that tests need no socket."""

    def shake(self) -> None:
        """One step of the handshake."""
        ...


class Handshakes:
    """Handshakes of one event loop, a few in each turn: one takes 0.2 to 5 ms, and hundreds may come at once.

    Clients, callers of the internal port and engines each have a row, and the rows go by turns. With one row for all,
    engines waited behind a crowd of clients until their time was over, and the router took them for unhealthy.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """``call_soon``: calls a function in the next turn of the loop."""
        self._call_soon = call_soon
        self._waiting: deque[deque[Shaking]] = deque()
        """The rows that are not empty; the first one is next."""
        self._is_due = False

    def row(self) -> HandshakeRow:
        """A new row."""
        return HandshakeRow(self)

    def enter(self, connection: Shaking, row: deque[Shaking]) -> None:
        """The handshake of ``connection`` goes on in the next turn or a later one. ``HandshakeRow`` calls it."""
        row.append(connection)
        if len(row) == 1:
            self._waiting.append(row)
        self._want_turn()

    def _want_turn(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._take_some)

    def _take_some(self) -> None:
        self._is_due = False
        ends_at = time.monotonic() + SLICE_S
        try:
            while self._waiting and time.monotonic() < ends_at:
                self._let_shake(self._next())
        finally:
            if self._waiting:
                self._want_turn()

    def _next(self) -> Shaking:
        row = self._waiting.popleft()
        connection = row.popleft()
        if row:
            self._waiting.append(row)
        return connection

    def _let_shake(self, connection: Shaking) -> None:
        """Closes the connection after a bug of ours. Else the connection could stay, unread, without a timer."""
        try:
            connection.shake()
        except BaseException:
            connection.abort()
            raise


class HandshakeRow:
    """Handshakes in the order in which they came. Event loop only."""

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes
        self._waiting: deque[Shaking] = deque()

    def enter(self, connection: Shaking) -> None:
        """The handshake of ``connection`` goes on in the next turn or a later one."""
        self._handshakes.enter(connection, self._waiting)


class Counting(Protocol):
    """Counts connections."""

    def opened(self, connection: Any, address: str) -> bool: ...

    def closed(self, connection: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class TlsPort:
    """The common part of all connections of one port."""

    context: Callable[[], ssl.SSLContext]
    """Returns the context with the current certificate."""
    new_protocol: Callable[[], asyncio.Protocol]
    """Makes the protocol above, once there is an agreement."""
    handshakes: HandshakeRow
    shaking: set[Any]
    """The connections that have no protocol yet: uvicorn's own set, which uvicorn closes at its end."""
    clients: Counting
    on_refused: Callable[[str], None]
    """Called once with the reason why there is no agreement."""
    http_answer: bytes
    """The answer for a client that speaks plain HTTP."""
    new_unread: Callable[[Any], Unread]
    """Makes the room for bytes of one connection that are not decrypted yet, once ``clients`` counts it."""
    on_no_room: Callable[[], None]
    """Called when such bytes find no room."""
    handshake_timeout_s: float
    linger_s: float
    """Seconds that a client gets to read our last bytes."""
