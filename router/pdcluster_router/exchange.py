"""One client request between its decode and its prefill engine: carries out what the pairing decides.

    client <--HotCycle-- Relay <-- DecodeLeg --> decode engine --reservation--> metaserver
                          |                                                         |
                       Exchange <----------------- ReservationCalls <---------------+
                          |
                       PrefillLeg --> prefill engine

Owns the request's legs, its open metaserver calls and its one timer, and gives all of them back when the
pairing is over. Decides nothing that ``core/pairing.py`` can decide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdcluster_protocol.metaserver import PREFILL_OK, Action, Outcome, failed
from pdcluster_protocol.params import DecodeParams, Reservation
from pdcluster_router import metrics
from pdcluster_router.connection import Lost
from pdcluster_router.core.openai_errors import (
    ApiError,
    bad_request,
    deadline_passed,
    decode_lost,
    no_engine,
    prefill_failed,
)
from pdcluster_router.core.pairing import Command, Event, Pairing, Phase, Timeouts
from pdcluster_router.core.rewrite import BadBody, ClientBody
from pdcluster_router.cycle import HotCycle
from pdcluster_router.decode import DecodeLeg
from pdcluster_router.engine import Role
from pdcluster_router.metrics import Span
from pdcluster_router.prefill import PrefillLeg
from pdcluster_router.relay import Relay
from pdcluster_router.reservation import ReservationCalls
from pdcluster_router.services import Services
from pdcluster_router.trace import Times

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What the client wants, parsed. ``headers``: whole lines that go to both engines."""

    path: bytes
    headers: bytes
    request_id: str
    body: ClientBody
    timeouts: Timeouts


class Exchange:
    """One request. Event loop only."""

    def __init__(self, services: Services, cycle: HotCycle, request: ClientRequest) -> None:
        now = services.now()
        transfer_id = services.new_transfer_id()
        self._services = services
        self._request = request
        self._has_transfer = not request.body.needs_local_prefill
        self._pairing = Pairing(transfer_id, request.timeouts, now=now, with_transfer=self._has_transfer)
        self._times = Times(transfer_id, request.request_id, received_at=now)
        self._cycle = cycle
        self._relay = Relay(self, cycle)
        self._decode = DecodeLeg(services, request.path, request.headers, request.body)
        self._calls = ReservationCalls(self)
        self._prefill: PrefillLeg | None = None
        self._failure: Outcome = failed("the request has ended")
        self._prefill_failure = ""
        self._error: ApiError | None = None
        self._result = metrics.Outcome.OK
        self._set_timer()

    def start(self) -> None:
        """The request goes to decode. The cycle is ours until its answer is over."""
        self._cycle.owner = self
        self._services.running.add(self)
        self._services.transfers[self._pairing.transfer_id] = self
        if not self._has_transfer:
            self._services.metrics.local_prefill.inc()
        self._send_to_decode("none is configured")

    # What the router and the metaserver say (Running).

    def stop(self, error: ApiError) -> None:
        self._fail(error, metrics.Outcome.LOST)

    def reserve(self, reservation: Reservation, cycle: HotCycle) -> Outcome | None:
        if not self._has_transfer or reservation.attempt != self._pairing.attempt:
            return failed(f"attempt {reservation.attempt} of this transfer is not running")
        is_first = self._calls.reservation is None
        outcome = self._calls.join(reservation, cycle)
        if is_first and outcome is None:
            self._reserved(reservation)
        return outcome

    def reservation_lost(self) -> None:
        self._prefill_failed("decode hung up on the metaserver")
        self._handle(Event.RESERVATION_LOST)

    # What the client's connection says (CycleOwner).

    def client_gone(self) -> None:
        self._result = metrics.Outcome.CLIENT_GONE
        self._failure = failed("the client has left")
        self._relay.stop()
        self._answer_over(None)
        self._handle(Event.CLIENT_GONE)

    def pause(self) -> None:
        self._relay.pause()

    def resume(self) -> None:
        self._relay.resume()

    # What decode's answer says (RelayOwner).

    def first_byte(self) -> None:
        self._times.first_byte_at = self._services.now()
        self._services.metrics.took(Span.FIRST_BYTE, self._times.first_byte_at - self._times.received_at)

    def answered(self, status: int) -> None:
        self._answer_over(status)
        self._handle(Event.DECODE_DONE)

    def cause_of(self, status: int) -> ApiError | None:
        # vLLM says no more than "Internal server error" of a request whose KV did not come.
        return prefill_failed(self._prefill_failure) if status >= 500 and self._prefill_failure else None

    def refused(self, status: int) -> None:
        self._result = metrics.Outcome.ENGINE_ERROR
        self._failure = failed("decode answered an error")
        self._answer_over(status)
        self._handle(Event.DECODE_REFUSED)

    def decode_lost(self, lost: Lost) -> None:
        engine = self._decode.engine
        assert engine is not None
        if self._calls.reservation is None and self._decode.may_send_again(lost):
            self._renew_transfer()
            self._send_to_decode(f"{engine.url}: {lost.reason}")
            return
        logger.warning(
            "decode lost request_id=%s engine=%s reason=%s", self._request.request_id, engine.url, lost.reason
        )
        self._fail(decode_lost(engine.url, lost.reason), metrics.Outcome.LOST)

    # What prefill's answer says (PrefillOwner).

    def prefill_ended(self, failure: str | None) -> None:
        now = self._services.now()
        self._times.prefill_replied_at = now
        self._services.metrics.took(Span.PREFILL, now - (self._times.prefill_sent_at or now))
        self._leave_prefill()
        if failure is None:
            self._handle(Event.PREFILL_DONE)
        else:
            self._prefill_failed(failure)
            self._handle(Event.PREFILL_FAILED)

    def _handle(self, event: Event) -> None:
        self._carry_out(self._pairing.handle(event, now=self._services.now()))

    def _carry_out(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            _CARRY_OUT[command](self)
        if self._pairing.is_over:
            self._close()

    def _set_timer(self) -> None:
        # Never later than a prefill that starts now may last: no later step can need an earlier wake-up.
        prefill_deadline = self._services.now() + self._request.timeouts.prefill_s
        wakes_at = min(self._pairing.deadline, prefill_deadline)
        self._timer = self._services.call_at(wakes_at, self._check_deadline)

    def _check_deadline(self) -> None:
        """The timer has fired: the deadline has passed, or has moved on since it was set."""
        now = self._services.now()
        if now >= self._pairing.deadline:
            phase = self._pairing.phase
            if phase is Phase.PREFILLING:
                self._prefill_failed("prefill did not answer in time")
            self._error = deadline_passed(now - self._times.received_at, _DOING[phase])
            self._carry_out(self._pairing.expire(now=now))
        if not self._pairing.is_over:
            self._set_timer()

    def _fail(self, error: ApiError, result: metrics.Outcome) -> None:
        self._result = result
        self._error = error
        self._failure = failed(error.message)
        self._handle(Event.DECODE_FAILED)

    def _send_to_decode(self, last_reason: str) -> None:
        if not self._decode.place():
            self._fail(no_engine("decode", last_reason), metrics.Outcome.UNAVAILABLE)
            return
        try:
            call = self._decode.send(self._decode_params(), self._relay)
        except BadBody as error:
            self._fail(bad_request(str(error)), metrics.Outcome.REJECTED)
        else:
            self._relay.begin(call)

    def _decode_params(self) -> DecodeParams | None:
        if not self._has_transfer:
            return None
        left_s = self._pairing.request_deadline - self._services.now()
        deadline_ms = max(1, int(left_s * 1000))
        return self._services.decode_params(self._pairing.transfer_id, self._pairing.attempt, deadline_ms)

    def _renew_transfer(self) -> None:
        """The request gets a new transfer id: whatever the first try may have left cannot be taken for it."""
        self._services.metrics.decode_resent.inc()
        del self._services.transfers[self._pairing.transfer_id]
        self._times.transfer_id = self._services.new_transfer_id()
        self._pairing.restart(self._times.transfer_id, now=self._services.now())
        self._services.transfers[self._times.transfer_id] = self

    def _reserved(self, reservation: Reservation) -> None:
        now = self._services.now()
        self._times.reserved_at = now
        self._times.prompt_tokens = reservation.num_prompt_tokens
        self._times.cached_tokens = reservation.remote_cached_tokens
        self._services.metrics.took(Span.RESERVATION, now - self._times.received_at)
        self._handle(Event.RESERVED)

    def _prefill_failed(self, reason: str) -> None:
        logger.warning("prefill failed request_id=%s reason=%s", self._request.request_id, reason)
        self._services.metrics.prefill_failed.inc()
        self._prefill_failure = reason
        self._failure = failed(reason, Action.RECOMPUTE)

    def _start_prefill(self) -> None:
        reservation = self._calls.reservation
        engine = self._services.place(Role.PREFILL)
        assert reservation is not None
        assert engine is not None, "settings hold at least one prefill engine"
        self._times.prefill_sent_at = self._services.now()
        num_tokens = reservation.num_prompt_tokens - reservation.remote_cached_tokens
        self._prefill = PrefillLeg(self, engine, num_tokens)
        body = self._request.body.for_prefill(reservation)
        self._prefill.send(self._request.path, self._request.headers, body)

    def _leave_prefill(self) -> None:
        leg, self._prefill = self._prefill, None
        if leg is not None:
            leg.close()

    def _leave_decode(self) -> None:
        self._decode.close()

    def _reply_ok(self) -> None:
        self._calls.reply(PREFILL_OK)

    def _reply_failed(self) -> None:
        self._calls.reply(self._failure)

    def _answer_error(self) -> None:
        assert self._error is not None
        status = None if self._cycle.has_started else self._error.status
        self._relay.fail(self._error)
        self._answer_over(status)

    def _answer_timeout(self) -> None:
        self._result = metrics.Outcome.TIMEOUT
        self._answer_error()

    def _answer_over(self, status: int | None) -> None:
        """The client has its answer, or has left. ``status``: what it got, None for no (whole) answer."""
        now = self._services.now()
        self._times.ended_at = now
        self._times.status = status
        self._services.metrics.took(Span.TOTAL, now - self._times.received_at)
        self._services.metrics.ended(self._result)

    def _close(self) -> None:
        """The pairing is over: nothing of this request is left."""
        if self not in self._services.running:
            return
        self._services.running.discard(self)
        self._services.transfers.pop(self._pairing.transfer_id, None)
        self._timer.cancel()
        self._leave_prefill()
        self._leave_decode()
        self._services.trace.write(self._times)


_CARRY_OUT: Final[dict[Command, Callable[[Exchange], None]]] = {
    Command.START_PREFILL: Exchange._start_prefill,
    Command.ABORT_PREFILL: Exchange._leave_prefill,
    Command.ABORT_DECODE: Exchange._leave_decode,
    Command.REPLY_OK: Exchange._reply_ok,
    Command.REPLY_FAILED: Exchange._reply_failed,
    Command.ANSWER_ERROR: Exchange._answer_error,
    Command.ANSWER_TIMEOUT: Exchange._answer_timeout,
}

_DOING: Final = {
    Phase.AWAITING_RESERVATION: "waiting for the decode engine",
    Phase.PREFILLING: "waiting for the prefill engine",
    Phase.DECODING: "decoding",
    Phase.TRAILING: "waiting for prefill's reply",
}
