"""The life of one request between a decode engine and a prefill engine.

Rule 1: every state, transition and deadline of a pairing lives in this file.
Rule 2: nothing here performs I/O or reads a clock. Callers pass ``now`` (seconds, monotonic),
        carry out the commands that come back, in order, and call ``expire`` when ``deadline`` passes.

    AWAITING_RESERVATION --RESERVED--> PREFILLING --PREFILL_DONE | PREFILL_FAILED | prefill deadline--> DECODING
             |                            |   |                                                           |
             |                            |   +--DECODE_DONE--> TRAILING --PREFILL_DONE | ..._FAILED--> DONE
             +--DECODE_DONE---------------|-----------------------------------------DECODE_DONE--------> DONE
             |                            |                                                               |
             +----------------------------+-- DECODE_FAILED, DECODE_REFUSED, CLIENT_GONE, deadline --> FAILED

Decode goes first: it reserves KV blocks and tells us where they are, and only then is prefill asked
to fill them. A failed prefill does not end the request: decode is told, and either recomputes or answers
an error. What ends a request early always stops the writer (prefill) before the blocks are freed (decode).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import Attempt, TransferId


class _Named(Enum):
    """Hashed by identity: every event of every request is looked up by two of these, and Enum's own hash is slow."""

    __hash__ = object.__hash__


class Phase(_Named):
    AWAITING_RESERVATION = auto()
    PREFILLING = auto()
    DECODING = auto()
    TRAILING = auto()
    """The client has its answer; prefill's own reply is still to come."""
    DONE = auto()
    FAILED = auto()


class Event(_Named):
    RESERVED = auto()
    RESERVATION_LOST = auto()
    """Decode hung up on the metaserver before the outcome: it has given up on this prefill."""
    PREFILL_DONE = auto()
    PREFILL_FAILED = auto()
    DECODE_DONE = auto()
    DECODE_REFUSED = auto()
    """Decode answered an error, and the client has it."""
    DECODE_FAILED = auto()
    """Decode did not answer, or not to the end."""
    CLIENT_GONE = auto()


class Command(_Named):
    START_PREFILL = auto()
    ABORT_PREFILL = auto()
    ABORT_DECODE = auto()
    REPLY_OK = auto()
    REPLY_FAILED = auto()
    ANSWER_ERROR = auto()
    ANSWER_TIMEOUT = auto()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long each phase may last, in seconds. The request's one deadline bounds them all."""

    request_s: float
    prefill_s: float
    reservation_s: float | None = None
    """None: as long as the request. Decode needs no reservation for a prompt it has cached whole."""


TERMINAL: Final = frozenset({Phase.DONE, Phase.FAILED})

_STOP_BOTH: Final = (Command.ABORT_PREFILL, Command.ABORT_DECODE, Command.REPLY_FAILED)

TRANSITIONS: Final[dict[tuple[Phase, Event], tuple[Phase, tuple[Command, ...]]]] = {
    (Phase.AWAITING_RESERVATION, Event.RESERVED): (Phase.PREFILLING, (Command.START_PREFILL,)),
    # The whole prompt was in decode's prefix cache, so decode never asked for a prefill.
    (Phase.AWAITING_RESERVATION, Event.DECODE_DONE): (Phase.DONE, ()),
    (Phase.AWAITING_RESERVATION, Event.DECODE_REFUSED): (Phase.FAILED, ()),
    (Phase.AWAITING_RESERVATION, Event.DECODE_FAILED): (Phase.FAILED, (Command.ABORT_DECODE, Command.ANSWER_ERROR)),
    (Phase.AWAITING_RESERVATION, Event.CLIENT_GONE): (Phase.FAILED, (Command.ABORT_DECODE,)),
    (Phase.PREFILLING, Event.PREFILL_DONE): (Phase.DECODING, (Command.REPLY_OK,)),
    (Phase.PREFILLING, Event.PREFILL_FAILED): (Phase.DECODING, (Command.REPLY_FAILED,)),
    (Phase.PREFILLING, Event.RESERVATION_LOST): (Phase.DECODING, (Command.ABORT_PREFILL,)),
    # KV reaches decode straight from the prefill workers, so a short answer can finish before the
    # prefill engine's own HTTP reply reaches us.
    (Phase.PREFILLING, Event.DECODE_DONE): (Phase.TRAILING, ()),
    (Phase.PREFILLING, Event.DECODE_REFUSED): (Phase.FAILED, (Command.ABORT_PREFILL, Command.REPLY_FAILED)),
    (Phase.PREFILLING, Event.DECODE_FAILED): (Phase.FAILED, (*_STOP_BOTH, Command.ANSWER_ERROR)),
    (Phase.PREFILLING, Event.CLIENT_GONE): (Phase.FAILED, _STOP_BOTH),
    (Phase.DECODING, Event.DECODE_DONE): (Phase.DONE, ()),
    (Phase.DECODING, Event.DECODE_REFUSED): (Phase.FAILED, ()),
    (Phase.DECODING, Event.DECODE_FAILED): (Phase.FAILED, (Command.ABORT_DECODE, Command.ANSWER_ERROR)),
    (Phase.DECODING, Event.CLIENT_GONE): (Phase.FAILED, (Command.ABORT_DECODE,)),
    (Phase.TRAILING, Event.PREFILL_DONE): (Phase.DONE, (Command.REPLY_OK,)),
    (Phase.TRAILING, Event.PREFILL_FAILED): (Phase.DONE, (Command.REPLY_FAILED,)),
    (Phase.TRAILING, Event.RESERVATION_LOST): (Phase.DONE, (Command.ABORT_PREFILL,)),
    (Phase.TRAILING, Event.DECODE_FAILED): (Phase.DONE, (Command.ABORT_PREFILL, Command.REPLY_FAILED)),
    (Phase.TRAILING, Event.CLIENT_GONE): (Phase.TRAILING, ()),
}

_REQUEST_EXPIRED: Final[dict[Phase, tuple[Phase, tuple[Command, ...]]]] = {
    Phase.AWAITING_RESERVATION: (Phase.FAILED, (Command.ABORT_DECODE, Command.ANSWER_TIMEOUT)),
    Phase.PREFILLING: (Phase.FAILED, (*_STOP_BOTH, Command.ANSWER_TIMEOUT)),
    Phase.DECODING: (Phase.FAILED, (Command.ABORT_DECODE, Command.ANSWER_TIMEOUT)),
    Phase.TRAILING: (Phase.DONE, (Command.ABORT_PREFILL, Command.REPLY_FAILED)),
}

_PREFILL_EXPIRED: Final = (Phase.DECODING, (Command.ABORT_PREFILL, Command.REPLY_FAILED))


class Pairing:
    """One request's pairing. Not thread-safe: one owner, the request's exchange."""

    __slots__ = ("_timeouts", "attempt", "deadline", "phase", "request_deadline", "transfer_id")

    def __init__(self, transfer_id: TransferId, timeouts: Timeouts, *, now: float, with_transfer: bool = True) -> None:
        """Awaits a reservation, or is decoding already when decode prefills by itself (no transfer)."""
        self.transfer_id = transfer_id
        self.attempt = Attempt(1)
        self._timeouts = timeouts
        self.request_deadline = now + timeouts.request_s
        self.phase = Phase.AWAITING_RESERVATION if with_transfer else Phase.DECODING
        self.deadline = self._deadline_of(self.phase, now=now)

    @property
    def is_over(self) -> bool:
        return self.phase in TERMINAL

    def handle(self, event: Event, *, now: float) -> tuple[Command, ...]:
        """Apply one event and return what must now be done, in order.

        Events that arrive after the end are expected (the network is late) and do nothing.

        Raises:
            ProtocolError: The event cannot happen in this phase, so a peer is misbehaving.
        """
        if self.phase in TERMINAL:
            return ()
        try:
            phase, commands = TRANSITIONS[self.phase, event]
        except KeyError:
            raise ProtocolError(f"transfer {self.transfer_id}: {event.name} while {self.phase.name}") from None
        return self._enter(phase, commands, now=now)

    def expire(self, *, now: float) -> tuple[Command, ...]:
        """End what is too late: the request, or only its prefill. Before ``deadline`` nothing happens."""
        if self.phase in TERMINAL or now < self.deadline:
            return ()
        if self.phase is Phase.PREFILLING and now < self.request_deadline:
            return self._enter(*_PREFILL_EXPIRED, now=now)
        return self._enter(*_REQUEST_EXPIRED[self.phase], now=now)

    def restart(self, transfer_id: TransferId, *, now: float) -> None:
        """Await a reservation under a new id: decode surely never saw the old one. The deadline stays.

        Raises:
            ProtocolError: Decode has reserved already, so it did see it.
        """
        if self.phase not in (Phase.AWAITING_RESERVATION, Phase.DECODING):
            raise ProtocolError(f"transfer {self.transfer_id}: cannot restart while {self.phase.name}")
        self.transfer_id = transfer_id
        self.deadline = self._deadline_of(self.phase, now=now)

    def _enter(self, phase: Phase, commands: tuple[Command, ...], *, now: float) -> tuple[Command, ...]:
        # A trailing prefill keeps the deadline it had.
        if phase is not Phase.TRAILING:
            self.deadline = self._deadline_of(phase, now=now)
        self.phase = phase
        return commands

    def _deadline_of(self, phase: Phase, *, now: float) -> float:
        if phase is Phase.PREFILLING:
            return min(now + self._timeouts.prefill_s, self.request_deadline)
        if phase is Phase.AWAITING_RESERVATION and self._timeouts.reservation_s is not None:
            return min(now + self._timeouts.reservation_s, self.request_deadline)
        return self.request_deadline
