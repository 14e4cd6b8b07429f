"""The parts of uvicorn that the router's HTTP protocol is made of. They are no interface: uvicorn is pinned exactly."""

from __future__ import annotations

import asyncio
import re
from importlib.metadata import requires, version

import pytest
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

pytestmark = pytest.mark.anyio

METHODS = {
    HttpToolsProtocol: (
        "connection_made",
        "connection_lost",
        "on_url",
        "on_message_begin",
        "on_headers_complete",
        "on_body",
        "on_message_complete",
        "on_response_complete",
        "pause_writing",
        "resume_writing",
        "timeout_keep_alive_handler",
        "_start_asgi_task",
        "_unset_keepalive_if_required",
    ),
    FlowControl: ("pause_reading", "resume_reading"),
    uvicorn.Server: ("startup", "shutdown", "handle_exit", "capture_signals"),
}
PROTOCOL_HAS = ("parser", "transport", "flow", "cycle", "scope", "pipeline", "app", "loop", "server_state")
PAUSING_HAS = ("timeout_keep_alive", "timeout_keep_alive_task")
READING_HAS = ("url", "headers", "expect_100_continue", "client")
CYCLE_HAS = ("more_body", "message_event", "disconnected", "response_started", "response_complete", "keep_alive")


async def handle(scope: object, receive: object, send: object) -> None:
    """No application is asked anything here."""


def test_it_is_the_version_that_was_read() -> None:
    pinned = [one for one in requires("pdcluster") or () if one.startswith("uvicorn")]
    assert [re.split("[;= ]+", one)[1] for one in pinned] == [version("uvicorn")]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in METHODS.items() for name in names])
def test_a_method_that_is_overridden_or_called_is_there(kind: type, name: str) -> None:
    assert callable(getattr(kind, name))


async def test_a_connection_and_its_page_have_what_is_read() -> None:
    config = Config(handle, lifespan="off", http=HttpToolsProtocol)
    config.load()
    protocol = HttpToolsProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.on_message_begin()
    assert protocol.server_state.total_requests == 0
    assert [name for name in (*PROTOCOL_HAS, *PAUSING_HAS, *READING_HAS) if not hasattr(protocol, name)] == []
    declared = RequestResponseCycle.__init__.__code__.co_names
    assert [name for name in (*CYCLE_HAS, "on_response") if name not in declared] == []


def test_a_status_has_its_line() -> None:
    assert STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"
