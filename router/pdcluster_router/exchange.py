"""One client request between decode and prefill engines: carries out what the pairing decides.

    client <--HotCycle-- Relay <-- DecodeLeg --> decode engine --reservation--> metaserver
                          |                                                         |
                       Exchange <----------------- ReservationCalls <---------------+
                          |
                    PrefillAttempts --> prefill engine, and the next one

Owns the request's legs, its open metaserver calls, its share of the prefill backlog and its one timer, and gives all
of them back when the pairing is over. Decides nothing that ``core/pairing.py`` can decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdcluster_protocol.metaserver import Outcome, failed, succeeded
from pdcluster_protocol.params import DecodeParams, Reservation
from pdcluster_router import metrics
from pdcluster_router.attempts import PrefillAttempts
from pdcluster_router.connection import Lost
from pdcluster_router.core.openai_errors import (
    NO_DECODE,
    ApiError,
    bad_request,
    deadline_passed,
    decode_lost,
    no_engine,
    prefill_failed,
)
from pdcluster_router.core.pairing import RETRIED_STATUSES, Command, Event, Pairing, Phase
from pdcluster_router.core.rewrite import BadBody
from pdcluster_router.core.scrub import scrub
from pdcluster_router.cycle import HotCycle
from pdcluster_router.decode import DecodeLeg
from pdcluster_router.failures import Kind
from pdcluster_router.record import Record
from pdcluster_router.relay import Refusal, Relay
from pdcluster_router.request import ClientRequest
from pdcluster_router.reservation import ReservationCalls, refusal_of
from pdcluster_router.services import Services


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the request ends, should it end now: what decode, the client and the metrics are told."""

    outcome: Outcome
    error: ApiError | Refusal
    result: metrics.Outcome


_UNDECIDED: Final = Verdict(
    failed("the request has ended"), no_engine("decode", NO_DECODE), metrics.Outcome.UNAVAILABLE
)


class Exchange:
    """One request. Event loop only."""

    def __init__(self, services: Services, cycle: HotCycle, request: ClientRequest) -> None:
        """The request has been admitted: it holds its share of the backlog, if prefill is to have it at all."""
        self._services = services
        self._request = request
        self._pairing = Pairing(
            services.new_transfer_id(),
            request.timeouts,
            request.terms.retries,
            now=services.now(),
            began_at=request.received_at,
            with_transfer=request.has_transfer,
        )
        self._record = Record(services, request, self._pairing.transfer_id)
        self._cycle = cycle
        self._relay = Relay(self, cycle)
        self._decode = DecodeLeg(request)
        self._calls = ReservationCalls(self)
        self._attempts = PrefillAttempts(services, request, self)
        self._has_share = request.has_transfer
        self._verdict = _UNDECIDED
        self._prefill_failure = ""
        """Why decode was told for good that there is no KV; empty while it was not."""
        self._set_timer()

    def start(self) -> None:
        """The request goes to decode. The cycle is ours until its answer is over."""
        self._cycle.owner = self
        self._services.running.add(self)
        self._services.transfers[self._pairing.transfer_id] = self
        if not self._request.has_transfer:
            self._services.metrics.local_prefill.inc()
        self._send_to_decode()

    @property
    def reservation(self) -> Reservation | None:
        """What decode asked for; None while it has not."""
        return self._calls.reservation

    @property
    def outcome(self) -> Outcome | None:
        """What decode was told of its prefill; None while that is not known."""
        return self._calls.outcome

    @property
    def is_done(self) -> bool:
        """The client has decode's whole answer, and prefill is over."""
        return self._pairing.phase is Phase.DONE

    # What the router and the metaserver say (Running).

    def stop(self, error: ApiError) -> None:
        self._record.failed(Kind.STOPPED, _DOING[self._pairing.phase])
        self._verdict = Verdict(failed(error.message), error, metrics.Outcome.LOST)
        self._handle(Event.GIVEN_UP)

    def reserve(self, reservation: Reservation, cycle: HotCycle) -> Outcome | None:
        action = self._request.terms.on_prefill_failure
        if refusal := refusal_of(reservation, self._calls, self._pairing, action):
            self._record.failed(Kind.RESERVATION_REFUSED, refusal.reason)
            return refusal
        is_first = self._calls.reservation is None
        is_lost = reservation.lost_attempt == self._pairing.attempt
        if is_lost:
            self._calls.reopen()
        outcome = self._calls.join(reservation, cycle)
        if is_first:
            self._record.reserved(reservation)
            self._handle(Event.RESERVED)
        elif is_lost:
            self._attempt_failed(Event.ATTEMPT_LOST, Kind.ATTEMPT_LOST, reservation.lost_reason)
        return outcome

    def reservation_lost(self) -> None:
        self._record.failed(Kind.RESERVATION_LOST, "decode hung up on the metaserver")
        self._handle(Event.RESERVATION_LOST)

    # What the client's connection says (CycleOwner).

    def client_gone(self) -> None:
        self._record.failed(Kind.CLIENT_GONE, _DOING[self._pairing.phase])
        self._record.answered(None, metrics.Outcome.CLIENT_GONE)
        self._verdict = Verdict(failed("the client has left"), self._verdict.error, metrics.Outcome.CLIENT_GONE)
        self._relay.stop()
        self._handle(Event.CLIENT_GONE)

    def pause(self) -> None:
        self._relay.pause()

    def resume(self) -> None:
        self._relay.resume()

    # What decode's answer says (RelayOwner).

    def first_byte(self) -> None:
        self._record.first_byte()

    def begins(self) -> None:
        self._handle(Event.FIRST_BYTE)

    def answered(self, status: int) -> None:
        self._record.answered(status, metrics.Outcome.OK)
        self._handle(Event.DECODE_DONE)

    def refused(self, refusal: Refusal) -> None:
        # vLLM says no more than "Internal server error" of a request whose KV did not come.
        is_prefills_fault = refusal.status >= 500 and bool(self._prefill_failure)
        error = prefill_failed(self._prefill_failure) if is_prefills_fault else refusal
        self._verdict = Verdict(failed("decode answered an error"), error, metrics.Outcome.ENGINE_ERROR)
        if is_prefills_fault or refusal.status not in RETRIED_STATUSES:
            self._handle(Event.DECODE_REFUSED)
        else:
            self._record.failed(Kind.DECODE_ERROR, f"it answered {refusal.status}", self._decode.name)
            self._handle(Event.DECODE_FAILED)

    def decode_lost(self, lost: Lost) -> None:
        name, reason = self._decode.name, scrub(lost.reason)
        error = decode_lost(name, reason)
        if self._calls.reservation is None and self._decode.may_send_again(lost):
            self._record.failed(Kind.DECODE_UNREACHED, reason, name)
            error = no_engine("decode", f"{name}: {reason}")
            self._verdict = Verdict(failed(error.message), error, metrics.Outcome.UNAVAILABLE)
            self._renew_transfer()
            self._send_to_decode()
            return
        self._record.failed(Kind.DECODE_LOST, reason, name)
        self._verdict = Verdict(failed(error.message), error, metrics.Outcome.LOST)
        self._handle(Event.DECODE_FAILED)

    # What prefill's answer says (PrefillOwner).

    def prefill_ended(self, failure: str | None) -> None:
        self._record.prefill_replied()
        self._attempts.abort()
        if failure is None:
            self._handle(Event.PREFILL_DONE)
        else:
            self._attempt_failed(Event.PREFILL_FAILED, Kind.PREFILL_FAILED, failure)

    def _handle(self, event: Event) -> None:
        for command in self._pairing.handle(event, now=self._services.now()):
            _CARRY_OUT[command](self)
        if self._has_share is not self._pairing.awaits_prefill:
            self._move_share()
        if self._pairing.is_over:
            self._close()

    def _move_share(self) -> None:
        """The backlog counts this request exactly while it is work for prefill."""
        self._has_share = not self._has_share
        num_tokens = self._request.body.estimated_prompt_tokens
        if self._has_share:
            self._services.admission.take_again(num_tokens)
        else:
            self._services.give_back(num_tokens)

    # Time.

    def _set_timer(self) -> None:
        # Never later than a prefill that starts now may last: no later step can need an earlier wake-up.
        prefill_deadline = self._services.now() + self._request.timeouts.prefill_s
        wakes_at = min(self._pairing.deadline, prefill_deadline)
        self._timer = self._services.call_at(wakes_at, self._check_deadline)

    def _check_deadline(self) -> None:
        """The timer has fired: the deadline has passed, or has moved on since it was set."""
        now = self._services.now()
        event = self._pairing.late_event(now=now)
        if event is Event.PREFILL_TIMED_OUT:
            reason = f"{self._attempts.engine_name} did not answer in time"
            self._attempt_failed(event, Kind.PREFILL_TIMEOUT, reason)
        elif event is not None:
            self._time_is_over(now - self._request.received_at)
        if not self._pairing.is_over:
            self._set_timer()

    def _time_is_over(self, seconds: float) -> None:
        doing = _DOING[self._pairing.phase]
        error = deadline_passed(seconds, doing)
        self._record.failed(Kind.DEADLINE, doing)
        self._verdict = Verdict(failed(error.message), error, metrics.Outcome.TIMEOUT)
        self._handle(Event.REQUEST_TIMED_OUT)

    # Decode.

    def _start_decode(self) -> None:
        """Another decode engine gets the whole request, as if it were new: nothing of the first try is kept."""
        self._relay.stop()
        self._relay = Relay(self, self._cycle)
        self._calls = ReservationCalls(self)
        self._prefill_failure = ""
        self._renew_transfer()
        self._timer.cancel()
        self._set_timer()
        self._send_to_decode()

    def _send_to_decode(self) -> None:
        if not self._decode.place():
            self._record.failed(Kind.NO_DECODE, "every decode engine that may be asked was tried")
            self._handle(Event.GIVEN_UP)  # With the last verdict: the client learns of the last failure.
            return
        try:
            call = self._decode.send(self._decode_params(), self._relay)
        except BadBody as error:
            told = bad_request(str(error))
            self._verdict = Verdict(failed(told.message), told, metrics.Outcome.REJECTED)
            self._handle(Event.GIVEN_UP)
        else:
            self._relay.begin(call)

    def _decode_params(self) -> DecodeParams | None:
        if not self._request.has_transfer:
            return None
        pairing = self._pairing
        return self._services.decode_params(
            pairing.transfer_id,
            pairing.attempt,
            pairing.request_deadline,
            wants_receipt=self._request.terms.wants_receipt,
        )

    def _renew_transfer(self) -> None:
        """The request gets a new transfer id: whatever the first try may have left cannot be taken for it."""
        del self._services.transfers[self._pairing.transfer_id]
        self._pairing.restart(self._services.new_transfer_id(), now=self._services.now())
        self._record.renewed(self._pairing.transfer_id)
        self._services.transfers[self._pairing.transfer_id] = self

    def _leave_decode(self) -> None:
        self._decode.leave()

    # Prefill.

    def _attempt_failed(self, event: Event, kind: Kind, reason: str) -> None:
        """One attempt is over without KV: the next one, or the end of prefill."""
        reason = scrub(reason) or "no reason was given"
        self._record.failed(kind, reason, self._attempts.engine_name)
        self._attempts.exclude()
        outcome = failed(reason, self._request.terms.on_prefill_failure)
        self._verdict = Verdict(outcome, prefill_failed(reason), metrics.Outcome.PREFILL_FAILED)
        self._handle(event)
        if self._pairing.phase in (Phase.LOCAL_PREFILL, Phase.FAILED):
            self._prefill_failure = reason
            self._record.failed(Kind.PREFILL_EXHAUSTED, reason)

    def _start_prefill(self) -> None:
        reservation = self._calls.reservation
        assert reservation is not None
        attempt = self._pairing.attempt
        if self._attempts.start(reservation, attempt, self._pairing.request_deadline, self._decode.revision):
            self._record.prefill_sent(attempt)
        else:
            self._handle(Event.NO_PREFILL_LEFT)

    def _leave_prefill(self) -> None:
        self._attempts.abort()

    def _reply_ok(self) -> None:
        self._calls.reply(succeeded(self._pairing.attempt))

    def _reply_failed(self) -> None:
        self._calls.reply(self._verdict.outcome)

    # The end.

    def _answer_error(self) -> None:
        error = self._verdict.error
        status = None if self._cycle.has_started else error.status
        if isinstance(error, Refusal):
            self._relay.refuse(error)
        else:
            self._relay.fail(error)
        self._record.answered(status, self._verdict.result)

    def _close(self) -> None:
        """The pairing is over: nothing of this request is left."""
        if self not in self._services.running:
            return
        self._services.running.discard(self)
        self._services.transfers.pop(self._pairing.transfer_id, None)
        self._timer.cancel()
        self._attempts.abort()
        self._decode.close()
        self._record.write()


_CARRY_OUT: Final[dict[Command, Callable[[Exchange], None]]] = {
    Command.START_PREFILL: Exchange._start_prefill,
    Command.ABORT_PREFILL: Exchange._leave_prefill,
    Command.START_DECODE: Exchange._start_decode,
    Command.ABORT_DECODE: Exchange._leave_decode,
    Command.REPLY_OK: Exchange._reply_ok,
    Command.REPLY_FAILED: Exchange._reply_failed,
    Command.ANSWER_ERROR: Exchange._answer_error,
    Command.ANSWER_TIMEOUT: Exchange._answer_error,
}

_DOING: Final = {
    Phase.AWAITING_RESERVATION: "waiting for the decode engine",
    Phase.PREFILLING: "waiting for the prefill engine",
    Phase.AWAITING_ANSWER: "waiting for decode's answer",
    Phase.LOCAL_PREFILL: "waiting for decode's own prefill",
    Phase.ANSWERING: "decoding",
    Phase.DECODING: "decoding",
    Phase.TRAILING: "waiting for prefill's reply",
}
