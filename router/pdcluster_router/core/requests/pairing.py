"""The life of one request between decode engines and prefill engines: pairing, and retries.

Rule 1: every state, transition, deadline and retry of a pairing lives in this file.
Rule 2: nothing here performs I/O or reads a clock. Callers pass ``now`` (seconds, monotonic),
        carry out the commands that come back, in order, and handle ``late_event`` when ``deadline`` passes.

                            +----- attempt failed, timed out or lost; another is left -----+
                            v                                                              |
    AWAITING_RESERVATION -RESERVED-> PREFILLING -PREFILL_DONE-> AWAITING_ANSWER -ATTEMPT_LOST
             +-PREFILLS_LOCALLY------|---|---|----------------+      |
             |                       |   |   +-no attempt left-> LOCAL_PREFILL      FIRST_BYTE = the client gets
             |           FIRST_BYTE--+   |                           |              decode's first bytes: nothing
             |               v           | FIRST_BYTE                | FIRST_BYTE   is tried again after it
             |           ANSWERING ------|--prefill over--+          |
             |               |           |                v          v
             +--FIRST_BYTE---|-----------|------------> DECODING <---+
                             v           |                |
                         TRAILING        |                +--DECODE_DONE--> DONE
                             |           v
                             +-------> DONE      CLIENT_GONE, REQUEST_TIMED_OUT, GIVEN_UP: to FAILED, not from TRAILING
                                           STALLED: to FAILED once the answer has begun

    DECODE_FAILED before FIRST_BYTE, with another decode attempt left: back to the beginning, new transfer id.

Decode goes first: it reserves KV blocks and tells us where they are. Then we ask prefill to fill them. After a failed
attempt another prefill engine gets the same reservation. When no attempt is left, decode is told, and either recomputes
or answers an error. Where ``Retries.recomputes`` is False the request fails at once instead, or its owner says
DECODE_FAILED: another revision can serve it. The end of an attempt always stops the writer (prefill) first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.labels import Role

FIRST_ATTEMPT: Final = Attempt(1)

RETRIED_STATUSES: Final = frozenset((500, 502, 503))
"""Decode's answers that say more about the engine than about the request: another decode engine may do better."""


class _Named(Enum):
    """Hashed by identity: every event of every request is looked up by two of these, and Enum's own hash is slow."""

    __hash__ = object.__hash__


class Phase(_Named):
    AWAITING_RESERVATION = auto()
    PREFILLING = auto()
    """An attempt runs. Decode has not begun to answer."""
    AWAITING_ANSWER = auto()
    """No attempt runs. Until its answer begins decode may still say that the last attempt was lost."""
    LOCAL_PREFILL = auto()
    """Decode prefills by itself: there is no transfer, no attempt is left, or it lacks too little to be pushed."""
    ANSWERING = auto()
    """Decode's answer has begun, so decode has all KV; prefill's own reply is still to come."""
    DECODING = auto()
    """Decode's answer has begun, and prefill is over."""
    TRAILING = auto()
    """The client has its answer; prefill's own reply is still to come."""
    DONE = auto()
    FAILED = auto()


class Event(_Named):
    RESERVED = auto()
    PREFILLS_LOCALLY = auto()
    """Decode makes no reservation: it computes what it lacks of the prompt itself."""
    RESERVATION_LOST = auto()
    """Decode hung up on the metaserver before the outcome. It may come back and say that the attempt is lost."""
    PREFILL_DONE = auto()
    PREFILL_FAILED = auto()
    PREFILL_TIMED_OUT = auto()
    """The attempt's own time is over. ``late_event`` finds it."""
    ATTEMPT_LOST = auto()
    """Decode says that the running, or just ended, attempt will never be complete."""
    NO_PREFILL_LEFT = auto()
    """``START_PREFILL`` found no engine that this request has not failed on."""
    FIRST_BYTE = auto()
    """The client gets the first bytes of decode's answer."""
    DECODE_DONE = auto()
    DECODE_REFUSED = auto()
    """Decode answered an error that is the client's to see."""
    DECODE_FAILED = auto()
    """Decode did not answer, broke its answer off, or answered an error that another decode engine may not have."""
    GIVEN_UP = auto()
    """No decode engine is left to ask, the request cannot be written, or the router stops."""
    CLIENT_GONE = auto()
    REQUEST_TIMED_OUT = auto()
    """The request's time, or its time until the first byte, is over. ``late_event`` finds it."""
    STALLED = auto()
    """The answer has begun, and none of its bytes has moved for too long. ``late_event`` finds it."""


class Command(_Named):
    START_PREFILL = auto()
    """Order ``attempt`` from an engine that this request has not failed on, or say NO_PREFILL_LEFT."""
    ABORT_PREFILL = auto()
    """Stop the running attempt, if one runs."""
    START_DECODE = auto()
    """Renew the transfer and send the request to a decode engine that it was not sent to, or say GIVEN_UP."""
    ABORT_DECODE = auto()
    REPLY_OK = auto()
    REPLY_FAILED = auto()
    ANSWER_ERROR = auto()
    """The client gets one error: the last one that happened."""
    ANSWER_TIMEOUT = auto()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long each part of a request may last, in seconds. No part is without a limit."""

    request_s: float | None
    """For the whole request. None: as long as its answer flows."""
    prefill_s: float
    """For each attempt."""
    reservation_s: float | None = None
    """For decode's reservation. None: until ``first_byte_s``, for decode may need none and say so late."""
    transfer_s: float = 600.0
    """From the client's request until decode has the KV, with all attempts. Engines are told how much is left."""
    first_byte_s: float = 600.0
    """From the client's request until its answer begins. An answer that is not streamed begins when it is whole."""
    idle_s: float = 120.0
    """Between two bytes of the answer, and without a byte from an engine whose probes get no answer."""
    gone_s: float = 30.0
    """Without a byte from an engine whose probes say that it is gone."""

    @property
    def enter_s(self) -> float:
        """From the client's request until it goes to decode at the latest."""
        return min(self.transfer_s, self.first_byte_s, math.inf if self.request_s is None else self.request_s)


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a request is tried, each at least 1. ``max_prefill_attempts`` counts over all its decode attempts."""

    max_prefill_attempts: int = 3
    max_decode_attempts: int = 2
    recomputes: bool = True
    """When no attempt is left decode may recompute; False: the client gets the error at once."""


Transition: TypeAlias = tuple[Phase, tuple[Command, ...]]
Table: TypeAlias = dict[tuple[Phase, Event], Transition]

TERMINAL: Final = frozenset({Phase.DONE, Phase.FAILED})

_STOP_BOTH: Final = (Command.ABORT_PREFILL, Command.ABORT_DECODE, Command.REPLY_FAILED)
_FAIL: Final[Transition] = (Phase.FAILED, (Command.ABORT_DECODE, Command.ANSWER_ERROR))
_FAIL_BOTH: Final[Transition] = (Phase.FAILED, (*_STOP_BOTH, Command.ANSWER_ERROR))
_TIME_OUT: Final[Transition] = (Phase.FAILED, (Command.ABORT_DECODE, Command.ANSWER_TIMEOUT))
_TIME_OUT_BOTH: Final[Transition] = (Phase.FAILED, (*_STOP_BOTH, Command.ANSWER_TIMEOUT))
_PREFILL_IS_OVER: Final = (Command.ABORT_PREFILL, Command.REPLY_FAILED)

_FAILED_ATTEMPTS: Final = (
    (Phase.PREFILLING, Event.PREFILL_FAILED),
    (Phase.PREFILLING, Event.PREFILL_TIMED_OUT),
    (Phase.PREFILLING, Event.ATTEMPT_LOST),
    (Phase.AWAITING_ANSWER, Event.ATTEMPT_LOST),
)
WORK: Final = {
    Phase.AWAITING_RESERVATION: Role.PREFILL,
    Phase.PREFILLING: Role.PREFILL,
    Phase.LOCAL_PREFILL: Role.DECODE,
}
"""The role that has to prefill a request, now or soon. In other phases none has: prefill is over, or not needed."""
_ANSWERS_BEFORE_PREFILL: Final = (Phase.AWAITING_RESERVATION, Phase.AWAITING_ANSWER, Phase.LOCAL_PREFILL)
_NO_PREFILL_RUNS: Final = (*_ANSWERS_BEFORE_PREFILL, Phase.DECODING)
_BOTH_RUN: Final = (Phase.PREFILLING, Phase.ANSWERING)
_PREFILL_RUNS: Final = frozenset((*_BOTH_RUN, Phase.TRAILING))
_ANSWER_FLOWS: Final = frozenset((Phase.ANSWERING, Phase.DECODING))
_RESERVING, _PREFILLING, _LOCALLY = Phase.AWAITING_RESERVATION, Phase.PREFILLING, Phase.LOCAL_PREFILL
"""Names of their own, because each request reads them: to find a member in its Enum takes ten times as long."""
_KEEPS_ITS_DEADLINE: Final = frozenset((Phase.ANSWERING, Phase.TRAILING))
"""In these phases only prefill's reply is awaited, and its deadline stays."""

TRANSITIONS: Final[Table] = {
    (Phase.AWAITING_RESERVATION, Event.RESERVED): (Phase.PREFILLING, (Command.START_PREFILL,)),
    (Phase.AWAITING_RESERVATION, Event.PREFILLS_LOCALLY): (Phase.LOCAL_PREFILL, ()),
    (Phase.PREFILLING, Event.PREFILL_DONE): (Phase.AWAITING_ANSWER, (Command.REPLY_OK,)),
    (Phase.PREFILLING, Event.NO_PREFILL_LEFT): (Phase.LOCAL_PREFILL, (Command.REPLY_FAILED,)),
    **dict.fromkeys(_FAILED_ATTEMPTS, (Phase.LOCAL_PREFILL, _PREFILL_IS_OVER)),
    (Phase.PREFILLING, Event.RESERVATION_LOST): (Phase.AWAITING_ANSWER, (Command.ABORT_PREFILL,)),
    # Without a reservation the whole prompt was in decode's prefix cache. KV reaches decode straight from the
    # prefill workers, so an answer can begin, and end, before the prefill engine's own HTTP reply reaches us.
    **{(phase, Event.FIRST_BYTE): (Phase.DECODING, ()) for phase in _ANSWERS_BEFORE_PREFILL},
    (Phase.PREFILLING, Event.FIRST_BYTE): (Phase.ANSWERING, ()),
    (Phase.ANSWERING, Event.PREFILL_DONE): (Phase.DECODING, (Command.REPLY_OK,)),
    (Phase.ANSWERING, Event.PREFILL_FAILED): (Phase.DECODING, _PREFILL_IS_OVER),
    (Phase.ANSWERING, Event.PREFILL_TIMED_OUT): (Phase.DECODING, _PREFILL_IS_OVER),
    (Phase.ANSWERING, Event.RESERVATION_LOST): (Phase.DECODING, (Command.ABORT_PREFILL,)),
    **{(phase, Event.DECODE_DONE): (Phase.DONE, ()) for phase in _NO_PREFILL_RUNS},
    **{(phase, Event.DECODE_DONE): (Phase.TRAILING, ()) for phase in _BOTH_RUN},
    (Phase.TRAILING, Event.PREFILL_DONE): (Phase.DONE, (Command.REPLY_OK,)),
    (Phase.TRAILING, Event.RESERVATION_LOST): (Phase.DONE, (Command.ABORT_PREFILL,)),
    (Phase.TRAILING, Event.CLIENT_GONE): (Phase.TRAILING, ()),
    # Events that end a request early.
    **{(phase, Event.DECODE_REFUSED): _FAIL for phase in _ANSWERS_BEFORE_PREFILL},
    (Phase.PREFILLING, Event.DECODE_REFUSED): _FAIL_BOTH,
    **{(phase, event): _FAIL for phase in _NO_PREFILL_RUNS for event in (Event.DECODE_FAILED, Event.GIVEN_UP)},
    **{(phase, event): _FAIL_BOTH for phase in _BOTH_RUN for event in (Event.DECODE_FAILED, Event.GIVEN_UP)},
    **{(phase, Event.CLIENT_GONE): (Phase.FAILED, (Command.ABORT_DECODE,)) for phase in _NO_PREFILL_RUNS},
    **{(phase, Event.CLIENT_GONE): (Phase.FAILED, _STOP_BOTH) for phase in _BOTH_RUN},
    **{(phase, Event.REQUEST_TIMED_OUT): _TIME_OUT for phase in _NO_PREFILL_RUNS},
    **{(phase, Event.REQUEST_TIMED_OUT): _TIME_OUT_BOTH for phase in _BOTH_RUN},
    (Phase.DECODING, Event.STALLED): _TIME_OUT,
    (Phase.ANSWERING, Event.STALLED): _TIME_OUT_BOTH,
    **{
        (Phase.TRAILING, event): (Phase.DONE, _PREFILL_IS_OVER)
        for event in (
            Event.PREFILL_FAILED,
            Event.PREFILL_TIMED_OUT,
            Event.REQUEST_TIMED_OUT,
            Event.DECODE_FAILED,
            Event.GIVEN_UP,
        )
    },
}
"""The next phase and the commands after an event, if nothing is tried again."""

PREFILL_RETRIES: Final[Table] = dict.fromkeys(
    _FAILED_ATTEMPTS, (Phase.PREFILLING, (Command.ABORT_PREFILL, Command.START_PREFILL))
)
"""Instead of ``TRANSITIONS`` while prefill attempts and time are left."""

DECODE_RETRIES: Final[Table] = {
    **{
        (phase, Event.DECODE_FAILED): (Phase.AWAITING_RESERVATION, (Command.ABORT_DECODE, Command.START_DECODE))
        for phase in _ANSWERS_BEFORE_PREFILL
    },
    (Phase.PREFILLING, Event.DECODE_FAILED): (Phase.AWAITING_RESERVATION, (*_STOP_BOTH, Command.START_DECODE)),
}
"""Instead of ``TRANSITIONS`` while decode attempts and time are left. Without a transfer the phase is LOCAL_PREFILL."""

FAILS_AT_ONCE: Final[Table] = dict.fromkeys((*_FAILED_ATTEMPTS, (Phase.PREFILLING, Event.NO_PREFILL_LEFT)), _FAIL_BOTH)
"""Instead of ``TRANSITIONS`` where decode shall not recompute."""
_FAILURES: Final = frozenset(event for _, event in (*PREFILL_RETRIES, *DECODE_RETRIES, *FAILS_AT_ONCE))


class Pairing:
    """One request's pairing. Not thread-safe: one owner, the request's exchange."""

    __slots__ = (
        "_byte_deadline",
        "_first_byte_deadline",
        "_num_decode_attempts",
        "_num_failed",
        "_phase_deadline",
        "_request_deadline",
        "_retries",
        "_start",
        "_timeouts",
        "attempt",
        "phase",
        "transfer_deadline",
        "transfer_id",
    )

    def __init__(
        self,
        transfer_id: TransferId,
        timeouts: Timeouts,
        retries: Retries = Retries(),
        *,
        now: float,
        began_at: float | None = None,
        with_transfer: bool = True,
    ) -> None:
        """Awaits a reservation; without a transfer decode prefills by itself. ``began_at``: when the client asked."""
        self.transfer_id = transfer_id
        self.attempt = FIRST_ATTEMPT
        self._timeouts = timeouts
        self._retries = retries
        self._num_failed = 0
        self._num_decode_attempts = 1
        self._start = _RESERVING if with_transfer else _LOCALLY
        began = now if began_at is None else began_at
        self._request_deadline = math.inf if timeouts.request_s is None else began + timeouts.request_s
        self._first_byte_deadline = min(began + timeouts.first_byte_s, self._request_deadline)
        self._byte_deadline = math.inf
        self.transfer_deadline = min(began + timeouts.transfer_s, self._request_deadline)
        """Until when decode must have the KV, monotonic seconds. Both engines are told it."""
        self.phase = self._start
        self._phase_deadline = self._deadline_of(self.phase, now=now)

    @property
    def is_over(self) -> bool:
        return self.phase in TERMINAL

    @property
    def deadline(self) -> float:
        """When ``late_event`` has an event to tell, monotonic seconds. It moves on as the answer flows."""
        return min(self._phase_deadline, self._byte_deadline)

    @property
    def is_at_start(self) -> bool:
        return self.phase is self._start  # Decode has said nothing of the transfer.

    @property
    def may_lose_attempt(self) -> bool:
        """Whether decode may say ATTEMPT_LOST: it has reserved, and its answer has not begun."""
        return self.phase is Phase.PREFILLING or self.phase is Phase.AWAITING_ANSWER

    def handle(self, event: Event, *, now: float) -> tuple[Command, ...]:
        """Apply one event and return what must now be done, in order.

        Events that arrive after the end are expected (the network is late) and do nothing.

        Raises:
            ProtocolError: The event cannot happen in this phase, so a peer is misbehaving.
        """
        if self.phase in TERMINAL:
            return ()
        key = (self.phase, event)
        step = TRANSITIONS.get(key)
        if step is None:
            raise ProtocolError(f"transfer {self.transfer_id}: {event.name} while {self.phase.name}")
        if event in _FAILURES:
            return self._failed(key, step, now=now)
        return self._enter(step, now=now)

    def late_event(self, *, now: float) -> Event | None:
        """The event for an attempt, a byte or a request that is too late; None: none is late. The caller handles it."""
        if self.phase in TERMINAL or now < self.deadline:
            return None
        if now >= self._request_deadline or self.phase not in _PREFILL_RUNS | _ANSWER_FLOWS:
            return Event.REQUEST_TIMED_OUT
        if now >= self._byte_deadline:
            return Event.STALLED
        is_answer_late = self.phase is Phase.PREFILLING and now >= self._first_byte_deadline
        return Event.REQUEST_TIMED_OUT if is_answer_late else Event.PREFILL_TIMED_OUT

    def heard(self, *, now: float) -> None:
        """Bytes of the answer have moved."""
        if self.phase in _ANSWER_FLOWS:
            self._byte_deadline = min(now + self._timeouts.idle_s, self._request_deadline)

    def restart(self, transfer_id: TransferId, *, now: float) -> None:
        """Begin under a new id: decode never saw the old one, or is not asked again. Only a reservation gets new time.

        Raises:
            ProtocolError: This transfer is under way: decode has seen its id.
        """
        if not self.is_at_start:
            raise ProtocolError(f"transfer {self.transfer_id}: cannot restart while {self.phase.name}")
        self.transfer_id = transfer_id
        self.attempt = FIRST_ATTEMPT
        self._phase_deadline = self._deadline_of(self.phase, now=now)

    def _failed(self, key: tuple[Phase, Event], step: Transition, *, now: float) -> tuple[Command, ...]:
        """The request is tried again, or ends as ``step`` or ``FAILS_AT_ONCE`` says."""
        if key in PREFILL_RETRIES:
            return self._attempt_failed(key, now=now)
        if key in DECODE_RETRIES and self.may_ask_another_decode(now):
            return self._ask_another_decode(key, now=now)
        if not self._retries.recomputes and key in FAILS_AT_ONCE:
            return self._enter(FAILS_AT_ONCE[key], now=now)
        return self._enter(step, now=now)

    def _attempt_failed(self, key: tuple[Phase, Event], *, now: float) -> tuple[Command, ...]:
        self._num_failed += 1
        if self._num_failed < self._retries.max_prefill_attempts and now < self.transfer_deadline:
            self.attempt = Attempt(self.attempt + 1)
            return self._enter(PREFILL_RETRIES[key], now=now)
        return self._enter((TRANSITIONS if self._retries.recomputes else FAILS_AT_ONCE)[key], now=now)

    def may_ask_another_decode(self, now: float) -> bool:
        return self._num_decode_attempts < self._retries.max_decode_attempts and now < self.transfer_deadline

    def _ask_another_decode(self, key: tuple[Phase, Event], *, now: float) -> tuple[Command, ...]:
        self._num_decode_attempts += 1
        _, commands = DECODE_RETRIES[key]
        return self._enter((self._start, commands), now=now)

    def _enter(self, step: Transition, *, now: float) -> tuple[Command, ...]:
        self.phase, commands = step
        if self.phase in TERMINAL:
            return commands
        flows = self.phase in _ANSWER_FLOWS
        if self.phase not in _KEEPS_ITS_DEADLINE:
            self._phase_deadline = self._request_deadline if flows else self._deadline_of(self.phase, now=now)
        self._byte_deadline = min(now + self._timeouts.idle_s, self._request_deadline) if flows else math.inf
        return commands

    def _deadline_of(self, phase: Phase, *, now: float) -> float:
        if phase is _PREFILLING:
            return min(now + self._timeouts.prefill_s, self.transfer_deadline)
        reservation_s = self._timeouts.reservation_s if phase is _RESERVING else None
        first_byte_deadline = self._first_byte_deadline
        return first_byte_deadline if reservation_s is None else min(now + reservation_s, first_byte_deadline)
