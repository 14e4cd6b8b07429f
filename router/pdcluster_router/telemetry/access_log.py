"""The access log: one JSON line for each request of a client that has ended. Off by default.

    HotCycle, Page --ended()--> AccessLog --the loop's next turn: line_of()--> LineFile
                                                                  ^
    Record, queue -------------- EndFacts ------------------------+

``docs/operations.md`` explains the fields. No body, key, header or query is in any of them, no address but the
client's.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

import msgspec

from pdcluster_protocol.access import AccessLine
from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.core.telemetry.answer_facts import AnswerFacts, StreamFacts
from pdcluster_router.core.telemetry.scrub import printable
from pdcluster_router.telemetry.failures import FailureKind
from pdcluster_router.telemetry.line_file import LineFile
from pdcluster_router.telemetry.metrics import Outcome

MAX_WORD_CHARS: Final = 128
"""The most characters of a text that a client chose: its path, its model."""
MAX_FAILURES: Final = 16
"""The most kinds of failures in one line: the first ones."""
PAUSE_S: Final = 0.1
"""Seconds between two writes: each wakes a thread, which takes Python's lock from the event loop."""


class EndFacts(msgspec.Struct, kw_only=True, frozen=True):
    """The facts of a request for its line of the access log."""

    outcome: Outcome | None
    failures: tuple[FailureKind, ...]
    left_queue_at: float
    """When the request was admitted or turned away. Monotonic seconds, like the times of ``trace``."""
    trace: RequestTrace | None = None
    decode_engine: str = ""
    prefill_engine: str = ""
    revision: str = ""
    is_local_prefill: bool | None = None
    num_decodes: int = 0
    num_prefills: int = 0
    num_parts: int = 1
    trace_id: str = ""
    """Empty: it has none, or only the one in its ``traceparent``."""

    def told(self) -> EndFacts:
        """These facts themselves: they do not change any more, and serve as a ``Teller`` too."""
        return self


def add_told(line: AccessLine, told: EndFacts, arrived_at: float) -> None:
    """Adds the engines' part to ``line``. ``arrived_at``: monotonic seconds."""
    line.outcome = told.outcome.value if told.outcome is not None else None
    line.failures = tuple([kind.value for kind in told.failures])
    line.decode_engine, line.prefill_engine, line.revision = told.decode_engine, told.prefill_engine, told.revision
    line.is_local_prefill = told.is_local_prefill
    line.decode_attempts, line.prefill_attempts = told.num_decodes, told.num_prefills
    line.parts = told.num_parts
    line.trace_id = told.trace_id or line.trace_id
    line.queue_s = _seconds(arrived_at, told.left_queue_at)
    if told.trace is not None:
        _add_trace(line, told.trace, arrived_at)


def _add_trace(line: AccessLine, trace: RequestTrace, arrived_at: float) -> None:
    line.transfer_id = trace.transfer_id
    line.prompt_tokens, line.cached_tokens = trace.prompt_tokens, trace.cached_tokens
    if trace.reserved_at is not None:
        line.reservation_s = _seconds(arrived_at, trace.reserved_at)
    if trace.prefill_sent_at is not None and trace.prefill_replied_at is not None:
        line.prefill_s = _seconds(trace.prefill_sent_at, trace.prefill_replied_at)


def add_answer(line: AccessLine, answer: AnswerFacts, arrived_at: float) -> None:
    """Adds the answer's part to ``line``. The prompt's tokens stay as the reservation said, if there was one."""
    line.bytes_out = answer.num_bytes
    if answer.first_at is not None:
        line.first_byte_s = _seconds(arrived_at, answer.first_at)
    counts = answer.token_counts
    line.output_tokens = counts.output_tokens
    if line.prompt_tokens is None:
        line.prompt_tokens, line.cached_tokens = counts.prompt_tokens, counts.cached_tokens
    if isinstance(answer, StreamFacts):
        _add_stream(line, answer)


def _add_stream(line: AccessLine, stream: StreamFacts) -> None:
    line.events = stream.num_events
    if (p50_s := stream.p50_gap_s) is not None:
        line.gap_p50_s, line.gap_max_s = _seconds(0.0, p50_s), _seconds(0.0, stream.max_gap_s)


def end(line: AccessLine, begun_at: float, arrived_at: float | None, ended_at: float) -> None:
    """Adds the times of a request that is over. In monotonic seconds: ``begun_at``, when its first byte came;
    ``arrived_at``, when all of it had come (None: it never had); ``ended_at``, when its answer ended."""
    line.ts = datetime.now(UTC)
    line.read_s = None if arrived_at is None else _seconds(begun_at, arrived_at)
    line.total_s = _seconds(begun_at if arrived_at is None else arrived_at, ended_at)


class Teller(Protocol):
    """The object that worked on a request last: its exchange's record, or its place in the queue."""

    def told(self) -> EndFacts:
        """All facts that the object knows. Called when the request is over."""
        ...


class EventLoop(Protocol):
    """An ``asyncio`` loop, as far as the log needs one."""

    def call_soon(self, callback: Callable[[], None], /) -> object: ...

    def call_later(self, delay_s: float, callback: Callable[[], None], /) -> object: ...


class AccessLog:
    """Owned by the router. Event loop only; ``close`` writes what is left."""

    def __init__(self, path: Path, count_lost: Callable[[int], None], loop: EventLoop) -> None:
        """Opens the file. ``count_lost``: called with the number of lines that are lost, in either thread.

        Raises:
            ConfigError: It cannot be written.
        """
        self._file = LineFile(path, FLAG, count_lost)
        self._loop = loop
        self._ended: list[Callable[[], AccessLine]] = []
        self._lines: list[bytes] = []

    def ended(self, line_of: Callable[[], AccessLine]) -> None:
        """A request is over. Its line is made in the loop's next turn: by then all facts of its end are known."""
        if not self._ended:
            self._loop.call_soon(self._make)
        self._ended.append(line_of)

    def close(self) -> None:
        """Writes all that can be written. Waits up to 2 s for a disk that stands still."""
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
    """A client's word, cut and printable."""
    return printable(text[:MAX_WORD_CHARS])


def _seconds(begin: float, end: float) -> float:
    """Seconds in whole microseconds: no time that is measured here is more exact, and a line is half as long."""
    return int((end - begin) * 1e6 + 0.5) / 1e6
