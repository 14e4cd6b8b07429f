"""A connection without a request is closed when its pause has lasted its time; loop and transport are fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from pdcluster_router.http.pauses import PausingProtocol

LIMIT_S = 5


class Loop:
    """Time that a test moves on, and at most one timer."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_timers = 0
        """So often a timer was set."""
        self._timer: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Loop:
        assert self._timer is None
        self.num_timers += 1
        self._timer = (self.now + delay_s, callback)
        return self

    def cancel(self) -> None:
        self._timer = None

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timer is not None and self._timer[0] <= end:
            (self.now, callback), self._timer = self._timer, None
            callback()
        self.now = end

    @property
    def has_timer(self) -> bool:
        return self._timer is not None


class Transport:
    """The end of a connection."""

    def __init__(self) -> None:
        self.is_closed = False
        self.is_read = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


async def handle(scope: object, receive: object, send: object) -> None:
    """No application is asked anything here."""


class Connection:
    """A connection, and what its client does."""

    def __init__(self) -> None:
        config = Config(handle, lifespan="off", timeout_keep_alive=LIMIT_S)
        config.load()
        self.loop, self.transport = Loop(), Transport()
        self.protocol = PausingProtocol(config, ServerState(), {}, cast("Any", self.loop))
        self.protocol.transport = cast("Any", self.transport)
        self.protocol.flow = FlowControl(cast("Any", self.transport))

    def asks(self) -> None:
        self.protocol.idle_since = None  # As each read does.

    def is_answered(self) -> None:
        self.protocol.go_on_or_pause()


@pytest.fixture
def connection() -> Connection:
    return Connection()


def test_a_connection_that_is_idle_for_its_time_is_closed(connection: Connection) -> None:
    connection.is_answered()
    connection.loop.advance(LIMIT_S - 0.1)
    assert not connection.transport.is_closed
    connection.loop.advance(0.1)
    assert connection.transport.is_closed


def test_each_pause_has_its_whole_time_and_all_have_one_timer(connection: Connection) -> None:
    for _ in range(8):
        connection.asks()
        connection.is_answered()
        connection.loop.advance(0.5)
    assert connection.loop.num_timers == 1
    connection.loop.advance(LIMIT_S - 0.6)
    assert not connection.transport.is_closed
    connection.loop.advance(0.1)
    assert connection.transport.is_closed


def test_a_connection_that_waits_for_its_answer_is_not_idle(connection: Connection) -> None:
    connection.is_answered()
    connection.asks()
    connection.loop.advance(10 * LIMIT_S)
    assert not connection.transport.is_closed
    connection.is_answered()
    connection.loop.advance(LIMIT_S - 0.1)
    assert not connection.transport.is_closed
    connection.loop.advance(0.1)
    assert connection.transport.is_closed


def test_a_lost_connection_leaves_no_timer(connection: Connection) -> None:
    connection.is_answered()
    connection.protocol.connection_lost(None)
    assert not connection.loop.has_timer


def test_the_next_request_begins_before_any_pause(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.setattr(connection.protocol, "_start_asgi_task", lambda cycle, _: begun.append(cycle))
    first, second = object(), object()
    connection.protocol.pipeline.extend(cast("Any", [(second, None), (first, None)]))
    connection.protocol.flow.pause_reading()
    connection.is_answered()
    assert begun == [first]
    assert connection.transport.is_read
    assert not connection.loop.has_timer


def test_a_connection_that_closes_begins_nothing(connection: Connection) -> None:
    connection.transport.close()
    connection.is_answered()
    assert not connection.loop.has_timer
    assert connection.protocol.server_state.total_requests == 1
