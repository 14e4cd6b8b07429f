"""Every kind of failure, told in one way: one log line and one count, with the same keys everywhere.

    failure kind=prefill_failed request_id=... transfer_id=... attempt=1 engine=prefill-0 reason=...

``docs/operations.md`` says for each kind what the operator on call does. Addresses, tokens and prompts are in no
line: engines go by their names, reasons are scrubbed. A storm of one kind is counted whole and logged in part.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pdcluster_router.core.telemetry.recent import RecentCounts
from pdcluster_router.core.telemetry.scrub import scrub

logger = logging.getLogger(__name__)

MAX_LINES_PER_S: Final = 20
"""Lines of one kind in one second; 20 show a pattern, and 1,000 would cost the event loop 20 ms."""

RECENT_S: Final = 300.0
"""Failures of so many seconds are shown: long enough for a person to be called and look."""


class FailureKind(Enum):
    """Kinds of failures. The values are the metric's label and the line's ``kind``."""

    PREFILL_FAILED = "prefill_failed"
    """One attempt: the prefill engine refused, answered an error, or was lost."""
    PREFILL_TIMEOUT = "prefill_timeout"
    """One attempt: no answer within ``prefill_timeout_s``."""
    ATTEMPT_LOST = "attempt_lost"
    """One attempt: decode says that its KV will not be complete."""
    PREFILL_EXHAUSTED = "prefill_exhausted"
    """No attempt is left: decode recomputes, another revision's pair is asked, or the client gets an error."""
    RESERVATION_LOST = "reservation_lost"
    """Decode hung up on the metaserver before the outcome."""
    RESERVATION_REFUSED = "reservation_refused"
    """A metaserver call that is no reservation, or fits no running transfer."""
    BAD_TOKEN = "bad_token"  # noqa: S105 - a label
    """A metaserver call without a valid seal or token."""
    DECODE_UNREACHED = "decode_unreached"
    """The request surely never reached this decode engine; another one is asked."""
    DECODE_LOST = "decode_lost"
    """Decode did not answer, or not to the end."""
    DECODE_ERROR = "decode_error"
    """Decode answered 500, 502 or 503."""
    NO_DECODE = "no_decode"
    """No decode engine is left to ask."""
    DEADLINE = "deadline"
    """The request's time, or its time until the first byte, was over."""
    DECODE_STALLED = "decode_stalled"
    """Decode has begun its answer and sent nothing for ``idle_timeout_s``."""
    CLIENT_STALLED = "client_stalled"
    """The client has taken nothing of its answer for ``idle_timeout_s``."""
    CLIENT_GONE = "client_gone"
    WITHDRAWN = "withdrawn"
    """A part of a request that had ended: another part had failed, or the client had left."""
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    NO_ROOM = "no_room"
    """A client's body or head, or an answer to a question, found ``max_buffered_bytes`` in use."""
    TOO_MANY_CONNECTIONS = "too_many_connections"
    """A client's request came on a connection beyond ``max_connections``."""
    CROWDED_OUT = "crowded_out"
    """Connections to the internal port were closed: there were more than ``max_internal_connections``, or a call of an
    address that held less found no room."""
    TLS_REFUSED = "tls_refused"
    """A connection to the client port or the internal port, with TLS, came to no agreement: no TLS, none that both
    know, or a caller that does not trust the certificate."""
    PROXY_REFUSED = "proxy_refused"
    """A connection to the client port had to begin with a PROXY header: it had none, or came from no trusted proxy."""
    ENGINE_TLS_REFUSED = "engine_tls_refused"
    """A connection to an engine came to no TLS agreement: no request was sent on it."""
    DRAINING = "draining"
    """Turned away because the router shuts down."""
    STOPPED = "stopped"
    """Cut off because the router's drain time was over."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that failed. ``engine`` is a name like ``prefill-0``; ``reason`` may come from anywhere."""

    kind: FailureKind
    request_id: str = ""
    transfer_id: str = ""
    attempt: int = 0
    """0: before any attempt."""
    engine: str = ""
    reason: str = ""


class Failures:
    """Logs and counts failures. Event loop only."""

    def __init__(self, count: Callable[[FailureKind], None], now: Callable[[], float]) -> None:
        """``count``: the metric; ``now``: monotonic seconds."""
        self._count = count
        self._now = now
        self._second = 0
        self._num_lines: dict[FailureKind, int] = {}
        self._recent: RecentCounts[FailureKind] = RecentCounts(RECENT_S)
        self._last: OrderedDict[str, tuple[float, Failure | str]] = OrderedDict()
        """By engine: when it failed last, and the failure, or its words once they were asked for. The newest is at the
        end."""

    def tell(self, failure: Failure) -> None:
        """Counts the failure, and logs it unless its kind has had ``MAX_LINES_PER_S`` in this second."""
        self.count(failure.kind)
        if failure.engine:
            self._note(failure)
        if self._may_log(failure.kind):
            logger.warning(
                "failure kind=%s request_id=%s transfer_id=%s attempt=%d engine=%s reason=%s",
                failure.kind.value,
                _word(failure.request_id),
                _word(failure.transfer_id),
                failure.attempt,
                failure.engine or "-",
                scrub(failure.reason) or "-",
            )

    def count(self, kind: FailureKind) -> None:
        """Counts a failure without a log line: the same was told before."""
        self._count(kind)
        self._recent.add(kind, now=self._now())

    def recent(self) -> dict[FailureKind, int]:
        """The number of each kind in the last ``RECENT_S``; only kinds that occurred."""
        return dict(self._recent.counts(now=self._now()))

    def last_of(self, engine: str) -> tuple[float, str] | None:
        """The seconds since something failed at this engine, and what it was; None: no failure is known."""
        if engine not in self._last:
            return None
        at, failure = self._last[engine]
        if isinstance(failure, Failure):  # To scrub a long reason takes 0.2 ms: 100 ms for 500 engines.
            reason = scrub(failure.reason)[:_MAX_LAST_CHARS]
            failure = f"{failure.kind.value}{': ' if reason else ''}{reason}"
            self._last[engine] = at, failure
        return self._now() - at, failure

    def _note(self, failure: Failure) -> None:
        self._last.pop(failure.engine, None)
        self._last[failure.engine] = (self._now(), failure)
        if len(self._last) > _MAX_ENGINES:
            self._last.popitem(last=False)

    def _may_log(self, kind: FailureKind) -> bool:
        second = int(self._now())
        if second != self._second:
            self._second = second
            self._num_lines.clear()
        num_lines = self._num_lines[kind] = self._num_lines.get(kind, 0) + 1
        if num_lines == MAX_LINES_PER_S + 1:
            logger.warning("failure kind=%s: more in this second are counted, not logged", kind.value)
        return num_lines <= MAX_LINES_PER_S


_MAX_ID_CHARS: Final = 64
_MAX_LAST_CHARS: Final = 200
_MAX_ENGINES: Final = 1000
"""Engines whose last failure is remembered: a router meets more of them in its life than it has at a time."""


def _word(text: str) -> str:
    """An id that an unknown caller may have chosen, as one word."""
    return scrub(text).replace(" ", "_")[:_MAX_ID_CHARS] or "-"
