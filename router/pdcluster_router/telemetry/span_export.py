"""Spans of sampled requests on their way to an OpenTelemetry collector: docs/decisions/0042-spans.md.

    exchange, queue, refusals --add()--> queue --SpanExport's thread: spans_of(), encode, POST--> collector

A request pays for one row of bytes in a bounded queue. All else happens after it has ended, in one thread, which rests
after each request: it holds Python's lock while it works, and the event loop waits for that lock. What a slow, dead or
lying collector does not take is lost and counted. The log says when that begins and when it is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from pdcluster_router.core.telemetry.request_trace import SpanIds
from pdcluster_router.core.telemetry.scrub import scrub
from pdcluster_router.core.telemetry.spans import spans_of
from pdcluster_router.telemetry.kept import KeptRow, request_of, without_long_model
from pdcluster_router.telemetry.otlp import Sent, SpanCollector, SpanEncoder

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES: Final = 8 << 20
"""Bytes of requests that wait to be sent: some 15,000 good ones, or 20 s of a busy router."""
ENTRY_BYTES: Final = 400
"""The bytes that an entry takes besides its row: the objects around it."""
MAX_BATCH_BYTES: Final = 1 << 20
"""A POST has at most so many bytes, and one request more. Collectors take 4 MiB and more."""
PAUSE_S: Final = 1.0
"""Seconds between two looks at the queue."""
CLOSE_S: Final = 2.0
"""Seconds for the last batch."""
REST_S: Final = 0.0005
"""Seconds of rest after each request, so that the event loop gets Python's lock."""
TRIES: Final = 3
"""POSTs of one batch, one pause and then two pauses apart."""


class EndedRequest(msgspec.Struct, frozen=True, gc=False):
    """A sampled request that has ended."""

    ids: SpanIds
    row: bytes
    """Its ``KeptRow``, encoded: its size is known, and the garbage collector does not look at it."""
    arrived_at_unix_s: float
    num_parts: int = 0
    """Above 0: it was served in parts."""


class SpanSink(Protocol):
    """A collector, as the thread needs it."""

    problem: str

    def post(self, body: bytes) -> tuple[Sent, int]: ...

    def close(self) -> None: ...


class SpanExport:
    """Owned by ``Services``. ``add``: event loop only, never waits. ``close`` ends the thread."""

    def __init__(
        self,
        collector: SpanSink | SpanCollector,
        encoder: SpanEncoder,
        scheme: str,
        count_lost: Callable[[int], None],
        pause_s: float = PAUSE_S,
        close_s: float = CLOSE_S,
    ) -> None:
        """``scheme``: of the client port. ``count_lost``: called with the number of requests whose spans are lost, all
        or some, in either thread. ``pause_s``: between two looks at the queue. ``close_s``: ``close`` waits no longer.
        """
        self._close_s: Final = close_s
        self._pause_s: Final = pause_s
        self._collector = collector
        self._encoder = encoder
        self._scheme = scheme
        self._count_lost = count_lost
        self._ended: deque[EndedRequest] = deque()
        self._num_put_bytes = self._num_taken_bytes = 0
        """Two numbers, so that each has one writer: the event loop's thread, and ours."""
        self._num_full = self._num_full_told = 0
        """The requests that found the queue full; and how many of them the log has told of. The same two writers."""
        self._num_sending = 0
        """The requests of the batch that is being made or sent."""
        self._is_losing = False
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="pdcluster spans", daemon=True)
        self._thread.start()

    def add(self, ids: SpanIds, row: KeptRow, arrived_at_unix_s: float, num_parts: int = 0) -> None:
        """A sampled request has ended. Its spans are sent soon, or counted as lost."""
        entry = EndedRequest(ids, _encode(without_long_model(row)), arrived_at_unix_s, num_parts)
        num_bytes = len(entry.row) + ENTRY_BYTES
        if self._num_put_bytes - self._num_taken_bytes + num_bytes > MAX_QUEUED_BYTES:
            self._num_full += 1
            self._count_lost(1)
            return
        self._num_put_bytes += num_bytes
        self._ended.append(entry)

    def close(self) -> None:
        """Sends what the collector takes at once. Waits up to 2 s. The log tells how many requests have lost theirs."""
        self._is_closing.set()
        self._thread.join(self._close_s)
        if self._thread.is_alive() and (num_left := len(self._ended) + self._num_sending):
            self._count_lost(num_left)
            logger.warning("spans are lost requests=%d reason=the router ends, and its collector is slow", num_left)

    # Everything below runs in our own thread.

    def _send_all(self) -> None:
        while not self._is_closing.wait(self._pause_s):
            self._empty()
        self._empty()
        self._collector.close()

    def _empty(self) -> None:
        while self._ended:
            self._send(*self._next_batch())

    def _next_batch(self) -> tuple[bytes, int]:
        """The encoded spans of some requests, and the number of these requests."""
        batch, num_bytes = [], 0
        num_lost = 0
        while self._ended and num_bytes < MAX_BATCH_BYTES:
            self._num_sending += 1
            entry = self._ended.popleft()
            self._num_taken_bytes += len(entry.row) + ENTRY_BYTES
            try:
                batch.append(self._encoded(entry))
                num_bytes += len(batch[-1])
            except Exception:  # The top of this thread's work on one request: those of others are still sent.
                logger.exception("spans could not be made")
                num_lost += 1
            time.sleep(REST_S)
        self._num_sending = len(batch)
        if num_lost:
            self._count_lost(num_lost)
        return b"".join(batch), len(batch)

    def _encoded(self, entry: EndedRequest) -> bytes:
        request = request_of(_decode(entry.row))
        spans = spans_of(request, entry.ids, scheme=self._scheme, num_parts=entry.num_parts)
        return self._encoder.encode(entry.ids.trace_id, spans, entry.arrived_at_unix_s)

    def _send(self, batch: bytes, num_requests: int) -> None:
        if not num_requests:
            return
        for number in range(1, TRIES + 1):
            sent, num_rejected = self._collector.post(batch)
            if sent is not Sent.AGAIN or number == TRIES or self._is_closing.wait(self._pause_s * number):
                break
        self._num_sending = 0
        self._tell(num_requests if sent is not Sent.TAKEN else min(num_rejected, num_requests))

    def _tell(self, num_lost: int) -> None:
        """``num_lost``: of the batch that was sent. What has found the queue full since the last one is lost too."""
        if num_lost:
            self._count_lost(num_lost)
        num_full = self._num_full  # Once: it grows in the other thread.
        is_losing = num_lost > 0 or num_full > self._num_full_told
        self._num_full_told = num_full
        if is_losing and not self._is_losing:
            reason = scrub(self._collector.problem) if num_lost else "it takes them too slowly"
            logger.warning("spans are lost reason=%s: see that the collector of --otlp-endpoint takes them", reason)
        elif self._is_losing and not is_losing:
            logger.warning("spans are sent again")
        self._is_losing = is_losing


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(KeptRow).decode
