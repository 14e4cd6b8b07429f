"""Request ids and access log lines for the client port's pages, which are all paths that are not hot.

    LoggedPages --Page in the request's state--> handlers, which note keys, engines and errors in it

Probes of ``/health`` get no line.
"""

from __future__ import annotations

import os
from typing import Final

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcluster_protocol.access import AccessLine
from pdcluster_router.core.apis.openai_errors import BUG, ApiError, no_engine
from pdcluster_router.core.apis.request_head import ID_HEADER, request_id_in
from pdcluster_router.core.apis.trace_context import trace_id_in
from pdcluster_router.core.clients.room import SMALL_BYTES, RoomLimit
from pdcluster_router.core.telemetry.answer_facts import AnswerFacts
from pdcluster_router.engines.engine import Engine
from pdcluster_router.front.router import Router
from pdcluster_router.front.server_protocol import ROUTER_STATE
from pdcluster_router.http.reading import REFUSAL_STATE
from pdcluster_router.telemetry.access_log import add_answer, end, word_of
from pdcluster_router.telemetry.metrics import Outcome

TAKEN_AT_ONCE_BYTES: Final = 64 << 10
"""uvloop's high-water mark: so much is written without waiting for the client."""
_PAGE_STATE: Final = "page"
_UNLOGGED: Final = "/health"
_UNREACHED: Final = no_engine("decode", "").code


class Page:
    """The facts of one request for a page. Its handlers add some."""

    def __init__(self, scope: Scope, router: Router) -> None:
        headers = scope["headers"]
        self.request_id = request_id_in(headers) or os.urandom(16).hex().encode()
        self.trace_id = trace_id_in(headers, dict(headers))
        self.client_address = ""
        """Empty if the router has no access log."""
        if router.access_log is not None:
            self.client_address = router.addresses.of_connection(scope["client"])(headers)
        self.client = ""
        """The client's name, as in the access log."""
        self.engine: Engine | None = None
        """The last engine that was asked."""
        self.num_engines = 0
        self.is_engines_answer = False
        """Whether the answer is an engine's."""
        self.error: ApiError | None = None
        """The router's error, if that is the answer."""
        self._room = router.room
        self._held_bytes = 0
        self._holder = ""
        self._now = router.services.now
        self._answer = AnswerFacts()
        self._is_over = self._has_left = False
        self._num_bytes_in = 0
        self._status: int | None = None
        self._begun_at = self._now()
        self._ended_at = self._begun_at
        self._method, self._path = scope["method"], scope["path"]

    def asks(self, engine: Engine) -> None:
        """Notes that ``engine`` is asked now."""
        self.engine = engine
        self.num_engines += 1

    def hold(self, num_bytes: int, holder: str) -> bool:
        """Whether there is room for an answer of ``num_bytes``. It is held until the client has taken all but the last
        of them: the connection has a limit of time for that. ``holder``: as for ``Room.take``.

        A small answer takes none: nothing waits for its client.
        """
        if num_bytes <= TAKEN_AT_ONCE_BYTES:
            return True
        share = RoomLimit.CLIENTS if num_bytes <= SMALL_BYTES else RoomLimit.CLIENTS_LARGE
        if not self._room.take(num_bytes, share, holder):
            return False
        self._held_bytes, self._holder = num_bytes, holder
        return True

    def read(self, message: Message) -> None:
        self._num_bytes_in += len(message.get("body", b""))
        self._has_left = self._has_left or (message["type"] == "http.disconnect" and not self._is_over)

    def named(self, message: Message) -> Message:
        """``message`` for the client; the first one names the request's id. Notes status and bytes for the log."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return {**message, "headers": [*message.get("headers", ()), (ID_HEADER, self.request_id)]}
        body = message.get("body", b"")
        if body:
            self._answer.add(body, self._now())
        self._is_over = not message.get("more_body", False)
        return message

    def ended(self, refusal: ApiError | None = None) -> None:
        """The request has ended. ``refusal``: the error that the client got because the body could not be read."""
        if self._held_bytes:
            self._room.give_back(self._held_bytes, self._holder)
            self._held_bytes = 0
        self._ended_at = self._now()
        if refusal is not None:
            self.error, self._status, self._has_left = refusal, refusal.status, False

    def line(self) -> AccessLine:
        """The line of a request that has ended."""
        line = AccessLine(method=self._method, path=word_of(self._path), client=self.client)
        line.client_address = self.client_address
        line.request_id, line.trace_id = self.request_id.decode("ascii"), self.trace_id
        line.status, outcome = None if self._has_left else self._status, self._outcome()
        line.outcome = outcome.value if outcome is not None else None
        line.bytes_in, line.decode_attempts = self._num_bytes_in, self.num_engines
        if self.engine is not None:
            line.decode_engine, line.revision = self.engine.name, self.engine.revision
        add_answer(line, self._answer, self._begun_at)
        end(line, self._begun_at, None, self._ended_at)
        return line

    def _outcome(self) -> Outcome | None:
        if self._has_left:
            return Outcome.CLIENT_GONE
        if self._status is None:
            return Outcome.LOST  # The router has ended meanwhile.
        if self._status < 400:
            return Outcome.OK
        if self.is_engines_answer:
            return Outcome.ENGINE_ERROR
        if self._status == BUG.status and self.error is None:
            return None  # Starlette's answer to an exception without a handler.
        is_unreached = self.error is not None and self.error.code == _UNREACHED
        return Outcome.UNAVAILABLE if is_unreached else Outcome.REJECTED


class LoggedPages:
    """The client port's application, with request ids and access log lines added."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        router: Router = scope["state"][ROUTER_STATE]
        page = scope["state"][_PAGE_STATE] = Page(scope, router)

        async def read() -> Message:
            message = await receive()
            page.read(message)
            return message

        async def write(message: Message) -> None:
            await send(page.named(message))

        try:
            await self._app(scope, read, write)
        finally:
            page.ended(scope["state"].get(REFUSAL_STATE))
            if router.access_log is not None and scope["path"] != _UNLOGGED:
                router.access_log.ended(page.line)


def page_of(request: HTTPConnection) -> Page:
    """The page of a request that came to the client port."""
    page: Page = getattr(request.state, _PAGE_STATE)
    return page


def tell_error(request: HTTPConnection, error: ApiError) -> None:
    """Notes for the access log that ``error`` is the answer. Does nothing on the internal port."""
    if _PAGE_STATE in request.scope["state"]:
        page_of(request).error = error
