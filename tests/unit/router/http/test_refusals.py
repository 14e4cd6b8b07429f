"""A request whose answer is an error of the router's is told of once, and is answered whatever comes of that."""

from __future__ import annotations

import pytest

from pdcluster_router.core.apis.openai_errors import ApiError, internal, not_ready
from pdcluster_router.core.clients.room import Room
from pdcluster_router.http.cycle import NO_HEAD, HotCycle


class Connection:
    """Takes all that is written."""

    is_full = False

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def answered(self) -> None: ...

    def close(self, *, with_reset: bool = False) -> None: ...


def test_a_client_is_answered_though_the_one_that_is_told_fails() -> None:
    told: list[ApiError] = []

    def fail(_: HotCycle, error: ApiError) -> None:
        told.append(error)
        raise RuntimeError("a bug")

    connection = Connection()
    cycle = HotCycle(connection, b"/v1/completions", NO_HEAD, lambda _: None, Room(1 << 20))
    cycle.on_refused = fail
    with pytest.raises(RuntimeError):
        cycle.answer_error(not_ready("x"))
    cycle.answer_error(internal())
    assert told == [not_ready("x")]
    assert connection.written.startswith(b"HTTP/1.1 500 ")
