"""The connections to one engine, kept alive between requests.

The connection that became idle last is used first, so that the others age and the engine closes them.
Above the limit a call fails at once: requests wait in admission, not here.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass
from typing import Final

from pdcluster_router.http.connection import Call, Connection, Request, ResponseLost, ResponseSink
from pdcluster_router.http.engine_tls import EngineDoor, EngineTls, NoAgreementError

_OUR_LIMITS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""Errors when a limit of this process or machine is reached: nothing has reached the engine."""
_NO_DESCRIPTOR: Final = frozenset((errno.EMFILE, errno.ENFILE))
_DESCRIPTOR_PAUSE_S: Final = 0.01
_DESCRIPTOR_WAIT_S: Final = 0.5
"""A burst of clients takes all descriptors only until the loop has closed the connections above the limit."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """``idle_s``: seconds that an idle connection may be used again. ``connect_timeout_s``: seconds to connect."""

    max_connections: int
    connect_timeout_s: float
    idle_s: float


class IdleConnections:
    """The idle connections of all pools, whose descriptors can be freed. One event loop owns it."""

    def __init__(self) -> None:
        self.by_age: dict[Connection, None] = {}
        """In the order in which they became idle. Pools write here directly: each request removes and adds an entry."""

    def close_oldest(self) -> None:
        """Closes the connection that has been idle longest. Its descriptor is free after the loop's next turn."""
        if self.by_age:
            connection = next(iter(self.by_age))
            del self.by_age[connection]
            connection.abort()


class ConnectionPool:
    """Connections to one address. One event loop owns it; ``close`` ends everything that it started."""

    def __init__(
        self, host: str, port: int, limits: PoolLimits, all_idle: IdleConnections, door: EngineDoor | None = None
    ) -> None:
        """``all_idle``: shared by all pools of this process, as its descriptors are. ``door``: for an engine with
        TLS."""
        self._host = host
        self._port = port
        self._door = door
        self.limits = limits
        self._all_idle = all_idle
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Connection, None] = {}
        self._all: set[Connection] = set()
        self._connecting: dict[Call, asyncio.Task[None]] = {}
        self._exempt: list[Call] = []
        """Calls that the limit does not count; some of them may hold no connection any more."""
        self._keeps = True
        self._told = self._released, self._closed
        """Made once: a bound method of its own takes 80 bytes, and each connection has both."""

    @property
    def num_busy(self) -> int:
        """Connections that a call holds, or that are being made for one."""
        return len(self._all) - len(self._idle) + len(self._connecting)

    def send(self, request: Request, sink: ResponseSink, *, fresh: bool = False, is_exempt: bool = False) -> Call:
        """Starts one call. ``sink`` gets the response, never before this returns.

        ``fresh``: on a new connection, because an idle one was found closed. ``is_exempt``: the limit does not count
        the call, so that a busy engine still answers its probe, and a probe takes no request's connection.
        """
        call = Call(sink)
        if is_exempt:
            self._exempt = [*self._busy_exempt(), call]
        elif len(self._all) + len(self._connecting) >= self.limits.max_connections and self._is_full():
            reason = f"all {self.limits.max_connections} connections are in use"
            self._loop.call_soon(call.fail, ResponseLost(reason, is_unsent=True, is_ours=True))
            return call
        idle = None if fresh else self._take_idle()
        if idle is not None:
            idle.send(request, call)
        else:
            self._connect(request, call)
        return call

    def keep(self, keeps: bool) -> None:
        """Sets whether connections are kept between calls. If not, idle ones close now, the others after their call."""
        self._keeps = keeps
        if not keeps:
            for connection in list(self._idle):
                connection.abort()

    async def close(self) -> None:
        """No connection and no task is left."""
        tasks = list(self._connecting.values())
        for task in tasks:
            task.cancel()
        for connection in list(self._all):
            connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What a connection says.

    def _released(self, connection: Connection) -> None:
        if not self._keeps:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle[connection] = None
        self._all_idle.by_age[connection] = None

    def _closed(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._all_idle.by_age.pop(connection, None)
        self._all.discard(connection)

    def _is_full(self) -> bool:
        """Whether requests hold all connections that they may. A connection that a probe holds does not count."""
        most = self.limits.max_connections
        return self.num_busy >= most and self.num_busy - len(self._busy_exempt()) >= most

    def _busy_exempt(self) -> list[Call]:
        """Exempt calls that hold a connection or are making one; closed calls too, until their connection is closed."""
        return [call for call in self._exempt if call.connection is not None or call in self._connecting]

    def _take_idle(self) -> Connection | None:
        oldest = self._loop.time() - self.limits.idle_s
        while self._idle:
            connection, _ = self._idle.popitem()
            self._all_idle.by_age.pop(connection, None)  # ``close_oldest`` may have closed it.
            if connection.is_usable and connection.idle_since >= oldest:
                return connection
            self._all.discard(connection)  # It closes a turn of the loop later, and must not count as busy.
            connection.abort()
        return None

    def _connect(self, request: Request, call: Call) -> None:
        task = self._loop.create_task(self._connect_and_send(request, call))
        self._connecting[call] = task
        task.add_done_callback(lambda _: self._connecting.pop(call, None))
        call.cancel_connect = task.cancel

    async def _connect_and_send(self, request: Request, call: Call) -> None:
        deadline = self._loop.time() + self.limits.connect_timeout_s
        try:
            connection = await self._open_with_patience(deadline)
        except NoAgreementError as error:
            call.fail(ResponseLost(error.reason, is_unsent=True, is_untrusted=not error.is_silent))
        except TimeoutError:
            call.fail(ResponseLost(f"no connection within {self.limits.connect_timeout_s:g} s", is_unsent=True))
        except OSError as error:
            is_ours = error.errno in _OUR_LIMITS
            reason = f"cannot connect: {error.strerror or error}"
            lost = ResponseLost(reason, is_unsent=True, is_ours=is_ours, error_number=error.errno or 0)
            call.fail(lost)
        except UnicodeError as error:  # Of a name that DNS cannot have.
            call.fail(ResponseLost(f"cannot connect: {error}", is_unsent=True))
        else:
            del self._connecting[call]  # It counts as a connection now.
            call.cancel_connect = None  # It refers to this task, which would last as long as the call.
            if connection.is_usable:
                connection.send(request, call)
            else:
                call.fail(ResponseLost("the engine closed the new connection", is_unsent=True))

    async def _open_with_patience(self, deadline: float) -> Connection:
        """A new connection. Without a free descriptor each try closes an idle connection, for half a second at most.
        Raises OSError: none can be made; TimeoutError: none by ``deadline``; NoAgreementError: no agreement on TLS."""
        patient_until = self._loop.time() + min(_DESCRIPTOR_WAIT_S, self.limits.connect_timeout_s / 2)
        while True:
            try:
                return await self._open(deadline)
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR or self._loop.time() > patient_until:
                    raise
            self._all_idle.close_oldest()
            await asyncio.sleep(_DESCRIPTOR_PAUSE_S)

    async def _open(self, deadline: float) -> Connection:
        connection = Connection(*self._told)
        wire = connection if self._door is None else EngineTls(self._door, connection, self._loop)
        is_open = False
        try:
            async with asyncio.timeout_at(deadline):
                await self._loop.create_connection(lambda: wire, self._host, self._port)
            if isinstance(wire, EngineTls):
                await wire.agree(self.limits.connect_timeout_s, deadline)
            is_open = True
        finally:
            # We may be cancelled after the connection was made, and before this task was told.
            if not is_open:
                wire.abort()
        if connection.is_usable:
            self._all.add(connection)
        return connection
