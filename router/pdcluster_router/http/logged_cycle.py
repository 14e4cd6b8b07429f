"""The cycle of a client's request in a router with an access log: notes the facts for the log's line.

The facts about engines come from its ``teller``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from pdcluster_protocol.access import AccessLine
from pdcluster_router.core.apis.client_apis import REQUEST_PATHS
from pdcluster_router.core.apis.openai_errors import BUG
from pdcluster_router.core.apis.request_head import Headers, RequestHead, path_of
from pdcluster_router.core.apis.rewrite import ClientBody
from pdcluster_router.core.apis.trace_context import trace_id_in
from pdcluster_router.core.clients.room import Room
from pdcluster_router.core.requests.keep_alive import COMMENT
from pdcluster_router.core.telemetry.answer_facts import AnswerFacts, StreamFacts
from pdcluster_router.http.cycle import NO_HEAD, HotCycle
from pdcluster_router.http.cycle_ends import ClientConnection
from pdcluster_router.telemetry.access_log import AccessLog, add_answer, add_told, end, word_of
from pdcluster_router.telemetry.metrics import Outcome

_now: Final = time.monotonic
_NAMES: Final = {path: path.decode() for path in REQUEST_PATHS}


class LoggedCycle(HotCycle):
    """One request. Event loop only."""

    __slots__ = ("_answer", "_arrived_at", "_ended_at", "_line", "_log", "client_address")

    def __init__(
        self,
        log: AccessLog,
        address_of: Callable[[Headers], str],
        connection: ClientConnection,
        path: bytes,
        head: RequestHead,
        on_whole: Callable[[HotCycle], None],
        room: Room,
    ) -> None:
        """``address_of``: returns the client's address, from the headers of a whole head."""
        super().__init__(connection, path, head, on_whole, room)
        self._log = log
        self._line = AccessLine(method="" if head is NO_HEAD else "POST", path=_NAMES.get(path) or _word_in(path))
        self._line.client_address = self.client_address = address_of(head.headers)
        self._line.trace_id = trace_id_in(head.headers, head.fields)
        self._answer: AnswerFacts | None = None
        self.begun_at = self._ended_at = _now()  # ``begun_at`` is set anew where the first byte is known.
        self._arrived_at: float | None = None

    def asks_for(self, client: str, body: ClientBody) -> None:
        """Notes facts of the body. ``client``: the name of the request's key among the current keys."""
        self.client = client
        self._line.model, self._line.alias_of = word_of(body.model), word_of(body.alias_of)
        self._line.is_stream = body.is_stream

    def hand_over(self) -> None:
        if self._arrived_at is None:
            self._arrived_at = _now()
        super().hand_over()

    def start(self, status: int, headers: bytes, content_length: int | None, first: bytes) -> None:
        if not self.has_stream_begun:  # Else ``write`` notes the first bytes.
            self._line.status = status
            self._answer = StreamFacts() if b"text/event-stream" in headers.lower() else AnswerFacts()
            if first and first is not COMMENT:
                self._answer.add(first, _now())
        super().start(status, headers, content_length, first)

    def write(self, body: bytes) -> None:
        if body is not COMMENT and self._answer is not None:
            self._answer.add(body, _now())
        super().write(body)

    def _end(self) -> None:
        super()._end()
        self._ended_at = _now()
        self._log.ended(self._whole_line)

    def _whole_line(self) -> AccessLine:
        line, arrived_at = self._line, self.begun_at if self._arrived_at is None else self._arrived_at
        line.request_id, line.client = self.request_id.decode("ascii"), self.client
        line.bytes_in = self.num_body_bytes
        if self.teller is not None:
            add_told(line, self.teller.told(), arrived_at)
        elif line.status != BUG.status:
            line.outcome = (Outcome.CLIENT_GONE if self.disconnected else Outcome.REJECTED).value
        if self._answer is not None:
            add_answer(line, self._answer, arrived_at)
        end(line, self.begun_at, self._arrived_at, self._ended_at)
        return line


def _word_in(path: bytes) -> str:
    """The path for the log, without scheme, user and host, which a client may send too; empty: there is none."""
    named = path_of(path) if path else b""
    return word_of(named.decode("latin-1")) if named[:1] in (b"/", b"*") else ""  # Else it begins with scheme or user.
