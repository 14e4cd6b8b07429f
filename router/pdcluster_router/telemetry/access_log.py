"""The access log: one JSON line for each request of a client that has ended. Off by default.

    HotCycle, Page --ended()--> AccessLog --the loop's next turn: line_of()--> LineFile
                                                                  ^
    Record, queue ---------------- Told --------------------------+

``docs/operations.md`` explains the fields. No body, key, header, query or address is in any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

import msgspec

from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.core.answer_facts import AnswerFacts, StreamFacts
from pdcluster_router.telemetry.failures import FailureKind
from pdcluster_router.telemetry.line_file import LineFile
from pdcluster_router.telemetry.metrics import Outcome

MAX_WORD_CHARS: Final = 128
"""Of what a client chose: its path, its model."""
MAX_FAILURES: Final = 16
"""Kinds of failures in one line; the first ones."""
PAUSE_S: Final = 0.1
"""Seconds between two writes: each wakes a thread, which takes Python's lock from the event loop."""


class Told(msgspec.Struct, kw_only=True, frozen=True):
    """A request, as a part knows it that has worked on it."""

    outcome: Outcome | None
    failures: tuple[FailureKind, ...]
    left_queue_at: float
    """When it was admitted or turned away, monotonic seconds, as those of ``trace``."""
    trace: RequestTrace | None = None
    decode_engine: str = ""
    prefill_engine: str = ""
    revision: str = ""
    is_local_prefill: bool | None = None
    num_decodes: int = 0
    num_prefills: int = 0

    def told(self) -> Told:
        """Itself: it is a teller that knows all beforehand."""
        return self


class AccessLine(msgspec.Struct, kw_only=True, tag_field="event", tag="access"):
    """One request; its cycle or page fills it in. Seconds count from its arrival, unless they say otherwise, and are
    None where it did not come so far.

    It has arrived when it is whole and its turn on its connection, or when it is refused before that.
    """

    ts: datetime | None = None
    """When it ended, UTC."""
    request_id: str = ""
    """The one that came back as ``x-request-id``; empty for bytes that are no HTTP."""
    transfer_id: str = ""
    """The newest one, by which trace lines and connectors' logs are joined; empty before there is one."""
    trace_id: str = ""
    """Of the client's ``traceparent``; empty where it gave none that is valid."""
    client: str = ""
    """Name of the API key that was shown; empty where none is asked for, or none was valid."""
    method: str = ""
    path: str = ""
    """Without the query."""
    model: str = ""
    """The client's word; empty where it gave none."""
    is_stream: bool | None = None
    """Whether the client asked for a stream; None: its body was not read."""
    status: int | None = None
    """HTTP status that the client was sent; None: it left before. A stream that broke off later has 200."""
    outcome: str | None = None
    """A label of ``pdcluster_router_requests_total``; None: a bug of the router, which its log tells."""
    failures: tuple[str, ...] = ()
    """Kinds of ``pdcluster_router_failures_total`` on the way, those that were made good too."""
    decode_engine: str = ""
    """The last one that it was sent to, by its name on ``/pdcluster/pool``."""
    prefill_engine: str = ""
    """Likewise; empty where decode needed none."""
    revision: str = ""
    """Of both."""
    is_local_prefill: bool | None = None
    """Whether decode computes the prompt by itself, for its kind or because so little of it is left to compute."""
    decode_attempts: int = 0
    """How often it was sent to a decode engine."""
    prefill_attempts: int = 0
    """How often it was sent to a prefill engine."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt, those that decode had in its prefix cache."""
    output_tokens: int | None = None
    """Decode's ``usage``; None where its answer has none, as a stream whose client did not ask for it."""
    events: int | None = None
    """Of a stream, without ``[DONE]``."""
    bytes_in: int = 0
    """Of its body."""
    bytes_out: int = 0
    """Of its answer's body, without keep-alives."""
    read_s: float | None = None
    """From its head to its arrival."""
    queue_s: float | None = None
    """Until it was admitted, or turned away."""
    reservation_s: float | None = None
    """Until decode's reservation."""
    prefill_s: float | None = None
    """From the newest order to prefill to its answer."""
    first_byte_s: float | None = None
    """Until the first byte of the answer went to the client."""
    gap_p50_s: float | None = None
    """Of a stream, the median time between two chunks, within 7.5 %."""
    gap_max_s: float | None = None
    """The longest such time."""
    total_s: float | None = None
    """Until the end."""

    def add_told(self, told: Told, arrived_at: float) -> None:
        """The engines' part of it. ``arrived_at``: monotonic seconds."""
        self.outcome = told.outcome.value if told.outcome is not None else None
        self.failures = tuple([kind.value for kind in told.failures])
        self.decode_engine, self.prefill_engine, self.revision = told.decode_engine, told.prefill_engine, told.revision
        self.is_local_prefill = told.is_local_prefill
        self.decode_attempts, self.prefill_attempts = told.num_decodes, told.num_prefills
        self.queue_s = _seconds(arrived_at, told.left_queue_at)
        if told.trace is not None:
            self._add_trace(told.trace, arrived_at)

    def _add_trace(self, trace: RequestTrace, arrived_at: float) -> None:
        self.transfer_id = trace.transfer_id
        self.prompt_tokens, self.cached_tokens = trace.prompt_tokens, trace.cached_tokens
        if trace.reserved_at is not None:
            self.reservation_s = _seconds(arrived_at, trace.reserved_at)
        if trace.prefill_sent_at is not None and trace.prefill_replied_at is not None:
            self.prefill_s = _seconds(trace.prefill_sent_at, trace.prefill_replied_at)

    def add_answer(self, answer: AnswerFacts, arrived_at: float) -> None:
        """The part that its client got. What decode's reservation says of tokens comes before the answer's word."""
        self.bytes_out = answer.num_bytes
        if answer.first_at is not None:
            self.first_byte_s = _seconds(arrived_at, answer.first_at)
        counts = answer.token_counts
        self.output_tokens = counts.output_tokens
        if self.prompt_tokens is None:
            self.prompt_tokens, self.cached_tokens = counts.prompt_tokens, counts.cached_tokens
        if isinstance(answer, StreamFacts):
            self._add_stream(answer)

    def _add_stream(self, stream: StreamFacts) -> None:
        self.events = stream.num_events
        if (p50_s := stream.p50_gap_s) is not None:
            self.gap_p50_s, self.gap_max_s = _seconds(0.0, p50_s), _seconds(0.0, stream.max_gap_s)

    def end(self, begun_at: float, arrived_at: float | None, ended_at: float) -> None:
        """It is over since ``ended_at``. ``begun_at``: its head was there; ``arrived_at``: None if it never did."""
        self.ts = datetime.now(UTC)
        self.read_s = None if arrived_at is None else _seconds(begun_at, arrived_at)
        self.total_s = _seconds(begun_at if arrived_at is None else arrived_at, ended_at)


class Teller(Protocol):
    """The part that worked on a request last: its exchange's record, or its place in the queue."""

    def told(self) -> Told:
        """All that it knows. Asked when the request is over."""
        ...


class EventLoop(Protocol):
    """An ``asyncio`` loop, as far as the log needs one."""

    def call_soon(self, callback: Callable[[], None], /) -> object: ...

    def call_later(self, delay_s: float, callback: Callable[[], None], /) -> object: ...


class AccessLog:
    """Owned by the router. Event loop only; ``close`` writes what is left."""

    def __init__(self, path: Path, count_lost: Callable[[int], None], loop: EventLoop) -> None:
        """Opens the file. ``count_lost``: so many lines more are lost; called in either thread.

        Raises:
            ConfigError: It cannot be written.
        """
        self._file = LineFile(path, FLAG, count_lost)
        self._loop = loop
        self._ended: list[Callable[[], AccessLine]] = []
        self._lines: list[bytes] = []

    def ended(self, line_of: Callable[[], AccessLine]) -> None:
        """A request is over. Its line is made in the loop's next turn: by then every part has said how it ended."""
        if not self._ended:
            self._loop.call_soon(self._make)
        self._ended.append(line_of)

    def close(self) -> None:
        """Everything is written that can be. Waits up to 2 s for a disk that stands still."""
        self._make()
        self._write()
        self._file.close()

    def _make(self) -> None:
        ended, self._ended = self._ended, []
        if not self._lines:
            self._loop.call_later(PAUSE_S, self._write)
        self._lines += [_encode(line_of()) for line_of in ended]

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._file.write(b"\n".join([*lines, b""]), len(lines))


FLAG: Final = "--access-log"
_encode: Final = msgspec.json.Encoder().encode


def word_of(text: str) -> str:
    """A client's word, cut. ``?`` stands for what some readers take for a line's end, or a terminal for a command."""
    short = text[:MAX_WORD_CHARS]
    return short if short.isprintable() else "".join(char if char.isprintable() else "?" for char in short)


def _seconds(begin: float, end: float) -> float:
    """In whole microseconds: nothing that is measured here is exacter, and a line is half as long."""
    return int((end - begin) * 1e6 + 0.5) / 1e6
