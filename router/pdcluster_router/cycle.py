"""One request on a client's connection that we answer ourselves, past ASGI, and the writing of its answer.

Takes the place of uvicorn's ``RequestResponseCycle`` in ``HttpToolsProtocol`` (uvicorn 0.54
``protocols/http/httptools_impl.py``), hence ``response_complete``, ``disconnected``, ``keep_alive`` and
``message_event``.

    READING --whole body--> WAITING --start()--> ANSWERING --end()--> over, connection kept
                              |                      +------cut()---> over, connection closed without a clean end
                              +--answer()--> over     (in each state: client gone --> over)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from pdcluster_router.core.openai_errors import ApiError

JSON: Final = b"content-type: application/json\r\n"


class CycleOwner(Protocol):
    """Who works on the answer."""

    def client_gone(self) -> None:
        """Nobody reads the answer any more. Comes at most once, and not after the answer is over."""
        ...

    def pause(self) -> None:
        """The client reads slower than we write: write no more until ``resume``."""
        ...

    def resume(self) -> None: ...


class ClientConnection(Protocol):
    """What a cycle needs of the connection it came on."""

    def write(self, data: bytes) -> None: ...

    def answered(self) -> None:
        """The answer is whole: the next request may be answered."""
        ...

    def close(self) -> None:
        """Closed once everything written is sent, or the client takes it too slowly."""
        ...


class _NobodyWaits:
    """Stands for the asyncio.Event on which an ASGI application would wait."""

    def set(self) -> None:
        pass


class HotCycle:
    """One request, read and then answered. Event loop only."""

    __slots__ = (
        "_connection",
        "_is_chunked",
        "_num_body_bytes",
        "_parts",
        "disconnected",
        "has_started",
        "headers",
        "is_whole",
        "keep_alive",
        "on_whole",
        "owner",
        "path",
        "refusal",
        "response_complete",
        "takes_chunks",
    )

    message_event: Final = _NobodyWaits()

    def __init__(
        self,
        connection: ClientConnection,
        path: bytes,
        headers: list[tuple[bytes, bytes]],
        on_whole: Callable[[HotCycle], None],
    ) -> None:
        self.path = path
        self.headers = headers
        self.on_whole = on_whole
        self.keep_alive = True
        self.takes_chunks = True
        self.disconnected = False
        self.response_complete = False
        self.has_started = False
        self.is_whole = False
        self.owner: CycleOwner | None = None
        self.refusal: ApiError | None = None
        self._connection = connection
        self._is_chunked = False
        self._parts: list[bytes] = []
        self._num_body_bytes = 0

    # Reading.

    def add_body(self, part: bytes, max_body_bytes: int) -> bool:
        """Whether the body is still within its limit; what is above it is not kept."""
        self._num_body_bytes += len(part)
        if self._num_body_bytes > max_body_bytes:
            self._parts = []
            return False
        self._parts.append(part)
        return True

    def take_body(self) -> bytes:
        """The whole body, once."""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # Answering.

    def start(self, status: int, headers: bytes, content_length: int | None, first: bytes) -> None:
        """Status line, headers and the first bytes are on their way. ``headers``: whole lines, without framing."""
        self.has_started = True
        self._is_chunked = content_length is None and self.takes_chunks
        if content_length is not None:
            framing = b"content-length: %d\r\n" % content_length
        elif self._is_chunked:
            framing = b"transfer-encoding: chunked\r\n"
        else:
            framing, self.keep_alive = b"", False
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        head = b"%b%b%b%b\r\n" % (_status_line(status), headers, framing, closing)
        self._connection.write(head + self._framed(first))

    def write(self, body: bytes) -> None:
        """More of the answer. Not empty."""
        self._connection.write(self._framed(body))

    def end(self) -> None:
        """The answer is whole, and says so."""
        if self._is_chunked:
            self._connection.write(b"0\r\n\r\n")
        self._finish()

    def cut(self, last: bytes = b"") -> None:
        """The connection closes after ``last`` without a clean end, so that no client takes the answer for whole."""
        if last:
            self.write(last)
        self.keep_alive = False
        self._finish()

    def answer(self, status: int, body: bytes, headers: bytes = JSON) -> None:
        """One whole answer."""
        self.start(status, headers, len(body), body)
        self._finish()

    def answer_error(self, error: ApiError, headers: bytes = b"") -> None:
        retry = b"" if error.retry_after_s is None else b"retry-after: %d\r\n" % error.retry_after_s
        self.answer(error.status, error.body(), JSON + retry + headers)

    # What the connection says.

    def gone(self) -> None:
        """The connection is lost."""
        if self.response_complete:
            return
        self.disconnected = True
        self.response_complete = True
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.client_gone()

    def _framed(self, body: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked and body else body

    def _finish(self) -> None:
        self.response_complete = True
        self.owner = None
        if not self.keep_alive:
            self._connection.close()
        self._connection.answered()


def _status_line(status: int) -> bytes:
    return STATUS_LINE.get(status) or b"HTTP/1.1 %d \r\n" % status
