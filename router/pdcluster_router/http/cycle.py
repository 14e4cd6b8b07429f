"""One hot request on a connection: collects its bytes and writes its answer, without ASGI.

Takes the place of uvicorn's ``RequestResponseCycle`` in ``HttpToolsProtocol`` (uvicorn 0.54
``protocols/http/httptools_impl.py``), so it has ``response_complete``, ``disconnected``, ``keep_alive`` and
``message_event`` too.

    READING --whole body--> WAITING --start()--> ANSWERING --end()--> over, connection kept
                              |  |                   +------cut()---> over, connection closed without a clean end
                              |  +--answer()--> over    (in each state: client gone --> over)
                              +--comment()--> a stream of comments: start() goes on with it, an error is an event
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate
from typing import Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from pdcluster_router.core.apis.client_apis import api_of
from pdcluster_router.core.apis.openai_errors import ApiError, body_too_large, no_room, too_many_keys
from pdcluster_router.core.apis.request_head import RequestHead
from pdcluster_router.core.apis.sse import STREAM_LINES
from pdcluster_router.core.apis.trace_context import remains_of
from pdcluster_router.core.clients.api_keys import ApiKeys
from pdcluster_router.core.clients.key_slot import KeySlot
from pdcluster_router.core.clients.room import SMALL_BYTES, Room, RoomLimit
from pdcluster_router.core.requests.keep_alive import COMMENT
from pdcluster_router.http.cycle_ends import ClientConnection, CycleOwner, StreamSource
from pdcluster_router.http.gateway import Gateway
from pdcluster_router.telemetry.access_log import Teller

JSON: Final = b"content-type: application/json\r\n"
_ENGINES: Final = RoomLimit.ENGINES
_CLIENTS: Final = RoomLimit.CLIENTS
_CLIENTS_LARGE: Final = RoomLimit.CLIENTS_LARGE
"""Module constants: Python 3.11 takes ten times as long to find a member in its Enum."""
MAX_KEYS: Final = 300_000
"""The most colons in a client's body: one for each 28 bytes of the largest body. A key that the scan knows costs 52 ns
each time it is repeated. Colons are counted while the body comes: to count 8 MiB at once would take 3 ms."""
UNCOUNTED_BYTES: Final = 5 * MAX_KEYS
"""A shorter body cannot have ``MAX_KEYS`` keys: the shortest key takes 5 bytes with its value, as ``"":1,``."""


class _NoWaiter:
    """Takes the place of the asyncio.Event on which an ASGI application would wait."""

    def set(self) -> None:
        pass


NO_HEAD: Final = RequestHead([], {}, 0, expects_continue=False, request_id=b"")
"""The head of a request that could not be read, or whose head was forgotten."""


class HotCycle:
    """One request, read and then answered. Event loop only."""

    __slots__ = (
        "_body",
        "_connection",
        "_is_chunked",
        "_is_framed",
        "_num_colons",
        "_num_kept_bytes",
        "_on_whole",
        "_room",
        "begun_at",
        "client",
        "disconnected",
        "gateway",
        "has_started",
        "has_stream_begun",
        "head",
        "holder",
        "is_for_engines",
        "keep_alive",
        "keys",
        "num_body_bytes",
        "on_over",
        "on_refused",
        "owner",
        "path",
        "refusal",
        "request_id",
        "response_complete",
        "slot",
        "source",
        "takes_chunks",
        "teller",
        "whole_at",
    )

    message_event: Final = _NoWaiter()
    client_address = ""
    """Only a ``LoggedCycle`` has one that is not empty."""
    is_withdrawn = False
    """True: this is the cycle of a part, which was told to end because its whole has ended."""

    def __init__(
        self,
        connection: ClientConnection,
        path: bytes,
        head: RequestHead,
        on_whole: Callable[[HotCycle], None],
        room: Room,
        *,
        is_for_engines: bool = False,
    ) -> None:
        """``room``: counts the request's bytes. ``is_for_engines``: ``path`` is for engines only."""
        self.path = path
        self.head = head
        self.is_for_engines = is_for_engines
        self.request_id = head.request_id
        """The id in the answer's header; empty: the answer has no such header."""
        self.keep_alive = True
        self.takes_chunks = True
        self.disconnected = False
        self.response_complete = False
        self.has_started = False
        """Whether a status was sent to the client, if only that of a stream of comments."""
        self.has_stream_begun = False
        """Whether a comment has begun a stream."""
        self.source: StreamSource | None = None
        """The answer behind the stream; None: no engine was asked yet."""
        self.on_over: Callable[[HotCycle], None] | None = None
        """Called once, when the answer is over or the client gone."""
        self.slot: KeySlot | None = None
        """The slot of the request's key, given up when the request is over; None: the key has no limits."""
        self.on_refused: Callable[[HotCycle, ApiError], None] | None = None
        """Called once with the router's error, before the client gets that error."""
        self.teller: Teller | None = None
        """Tells the access log how the request went; None: the request was neither sent to an engine nor queued."""
        self.begun_at = 0.0
        """When the first byte came, monotonic seconds; 0: the request is an engine's, or none of its head was read."""
        self.whole_at = 0.0
        """When the last byte came, if the request had to wait for its turn then; else 0."""
        self.owner: CycleOwner | None = None
        self.gateway: Gateway | None = None
        """None: the router itself carries the bytes."""
        self.refusal: ApiError | None = None
        self.client = ""
        """The client's name, as in the access log; empty: clients need none."""
        self.keys: ApiKeys | None = None
        """The router's keys at the time when the client's key was checked."""
        self.holder = ""
        """Name of the client whose part of the room the request takes; empty: no client's."""
        self.num_body_bytes = 0
        """Body bytes that have come, kept or not."""
        self._connection = connection
        self._room = room
        self._on_whole = on_whole
        self._is_chunked = False
        self._is_framed = True
        self._body: bytes | bytearray = b""
        self._num_kept_bytes = 0
        self._num_colons = -1
        """Colons of the body so far; -1: they are not counted yet."""

    # Reading.

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The request's headers, with names in lower case, without those for this hop only."""
        return self.head.headers

    def add_head(self, num_bytes: int) -> ApiError | None:
        """The head takes ``num_bytes`` of the room until ``forget``. Returns the error if there is no room."""
        if not self._room.take(num_bytes, _ENGINES if self.is_for_engines else _CLIENTS, self.holder):
            return no_room(self._room.max_bytes)
        self._num_kept_bytes = num_bytes
        return None

    def add_body(self, part: bytes, max_body_bytes: int) -> ApiError | None:
        """Takes a part of the body. Returns the error if it is not taken: then nothing of the body is kept."""
        num_bytes = len(part)
        self.num_body_bytes += num_bytes
        if self.num_body_bytes > max_body_bytes:
            self._drop()
            return body_too_large(max_body_bytes)
        clients_share = _CLIENTS if self.num_body_bytes <= SMALL_BYTES else _CLIENTS_LARGE
        if not self._room.take(num_bytes, _ENGINES if self.is_for_engines else clients_share, self.holder):
            self._drop()
            return no_room(self._room.max_bytes)
        self._num_kept_bytes += num_bytes
        if not self._body:
            self._body = part
            return None
        if not isinstance(self._body, bytearray):
            self._body = bytearray(self._body)
        self._body += part
        if self.num_body_bytes > UNCOUNTED_BYTES and not self.is_for_engines and self._has_too_many_keys(part):
            self._drop()
            return too_many_keys(MAX_KEYS)
        return None

    def _has_too_many_keys(self, part: bytes) -> bool:
        is_first = self._num_colons < 0
        self._num_colons = self._body.count(b":") if is_first else self._num_colons + part.count(b":")
        return self._num_colons > MAX_KEYS

    def take_body(self) -> bytes | bytearray:
        """The whole body, once. A client's room stays taken until ``forget``; an engine's is free now."""
        body, self._body = self._body, b""
        if self.is_for_engines:
            self.forget()
        return body

    def hand_over(self) -> None:
        """Gives the whole request to its handler, at its turn. A second call does nothing."""
        on_whole, self._on_whole = self._on_whole, _is_handed_over
        on_whole(self)

    def forget(self) -> None:
        """Forgets head and body, and gives their room back."""
        if self._num_kept_bytes:
            self.head, self._body = NO_HEAD, b""
            self._room.give_back(self._num_kept_bytes, self.holder)
            self._num_kept_bytes = 0

    def _drop(self) -> None:
        """Forgets all of a refused request but its trace headers."""
        remains = remains_of(self.head)
        self.forget()
        self.head = remains

    # Answering.

    def start(self, status: int, headers: bytes, content_length: int | None, first: bytes) -> None:
        """Sends the status line, the headers and the first bytes. ``headers``: whole lines, without framing.

        If a comment has begun a stream, only the first bytes are written.
        """
        if self.has_stream_begun:
            if first:
                self.write(first)
            return
        self.has_started = True
        self._is_chunked = content_length is None and self.takes_chunks
        if content_length is not None:
            framing = b"content-length: %d\r\n" % content_length
        elif self._is_chunked:
            framing = b"transfer-encoding: chunked\r\n"
        else:
            framing, self.keep_alive, self._is_framed = b"", False, False
        if self.slot is not None:
            headers += self.slot.lines
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        named = b"x-request-id: %b\r\n" % self.request_id if self.request_id else b""
        line = STATUS_LINE.get(status) or b"HTTP/1.1 %d \r\n" % status
        if first and self._is_chunked:
            first = b"%x\r\n%b\r\n" % (len(first), first)
        self._connection.write(b"%b%b%b%b%b\r\n%b" % (line, headers, named, framing, closing, first))

    def write(self, body: bytes) -> None:
        """Sends more of the answer. ``body`` is not empty."""
        self._connection.write(b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body)

    @property
    def num_streamed_bytes(self) -> int:
        return self.source.num_streamed_bytes if self.source is not None else 0

    @property
    def may_comment(self) -> bool:
        """Whether a comment may be written now: the client reads, and the comment would tear no event."""
        return not self._connection.is_full and (self.source is None or self.source.may_comment)

    def comment(self) -> None:
        """Sends a comment, which shows that the stream lives and which clients ignore. Only if ``may_comment``."""
        if self.has_started:
            self.write(COMMENT)
            return
        lines = self.source.stream_lines if self.source is not None else b""
        self.start(200, lines or _date_line() + STREAM_LINES, None, COMMENT)
        self.has_stream_begun = True

    def end(self) -> None:
        """Ends an answer that is whole."""
        if self._is_chunked:
            self._connection.write(b"0\r\n\r\n")
        self._finish()

    def cut(self, last: bytes = b"", error: ApiError | None = None) -> None:  # noqa: ARG002 - a part's cycle reads it
        """Sends ``last``, which tells ``error``, and closes the connection without a clean end, so that no client takes
        the answer for whole."""
        if last:
            self.write(last)
        self.keep_alive = False
        # Without any framing (HTTP/1.0) an orderly end would be the end of the answer.
        self._finish(with_reset=not self._is_framed)

    def answer(self, status: int, body: bytes, headers: bytes = JSON) -> None:
        """Sends one whole answer."""
        self.start(status, headers, len(body), body)
        self._finish()

    def refuse(self, status: int, body: bytes, headers: bytes) -> None:
        """Answers with an engine's error; in a stream that has begun, as its last event, without a clean end."""
        if self.has_stream_begun:
            self.cut(api_of(self.path).refusal_event(body))
        else:
            self.answer(status, body, headers)

    def answer_error(self, error: ApiError, headers: bytes = b"") -> None:
        """Answers with the router's error; in a stream that has begun, as its last event, without a clean end."""
        on_refused, self.on_refused = self.on_refused, None
        if on_refused is not None:
            on_refused(self, error)
        if self.has_stream_begun:
            self.cut(api_of(self.path).error_event(error))
            return
        lines = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items()).encode()
        self.answer(error.status, api_of(self.path).error_body(error), JSON + _date_line() + lines + headers)

    def displaces(self) -> None:
        """It has taken the place of another key's request in the queue."""

    # What the connection says.

    def gone(self) -> None:
        """The connection is lost. Nothing of the request is kept."""
        self.forget()
        if self.response_complete:
            return
        self.disconnected = True
        self._end()
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.client_gone()

    def _end(self) -> None:
        self.response_complete = True
        self.source = None  # It refers to us.
        if self.slot is not None:
            slot, self.slot = self.slot, None
            slot.leave()
        if self.on_over is not None:
            self.on_over(self)
            self.on_over = None

    def _finish(self, *, with_reset: bool = False) -> None:
        self._end()
        self.owner = None
        if self._num_kept_bytes:
            self.forget()
        if not self.keep_alive:
            self._connection.close(with_reset=with_reset)
        self._connection.answered()


def _is_handed_over(_: HotCycle) -> None:
    """A second hand-over does nothing."""


def _date_line() -> bytes:
    return b"date: %b\r\n" % formatdate(usegmt=True).encode()
