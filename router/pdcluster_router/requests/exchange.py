"""One client request between decode and prefill engines: carries out what the pairing decides.

    client <--HotCycle-- Relay <-- DecodeLeg --> decode engine --reservation--> metaserver
                          |                                                         |
                       Exchange <----------------- ReservationCalls <---------------+
                          |
                    PrefillAttempts --> prefill engine, and the next one

Owns the request's legs, open metaserver calls, backlog share and timer. ``core/requests/pairing.py`` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdcluster_protocol.metaserver import PrefillOutcome, failed, succeeded
from pdcluster_protocol.params import LocalPrefill
from pdcluster_protocol.prefill_answer import PrefillAnswer
from pdcluster_router.core.apis.openai_errors import (
    ApiError,
    deadline_passed,
    decode_lost,
    no_engine,
    prefill_failed,
    stalled,
)
from pdcluster_router.core.engines.breaker import Blame
from pdcluster_router.core.requests.dialect import Posted
from pdcluster_router.core.requests.pairing import RETRIED_STATUSES, TERMINAL, WORK, Command, Event, Pairing, Phase
from pdcluster_router.core.telemetry.scrub import scrub
from pdcluster_router.http.connection import ResponseLost
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.requests.blame import blame_for
from pdcluster_router.requests.decode_leg import DecodeLeg
from pdcluster_router.requests.prefill_attempts import PrefillAttempts
from pdcluster_router.requests.record import DOING, NOT_DECODES_FAULT, UNDECIDED, Record, Verdict, is_overloaded
from pdcluster_router.requests.relay import DecodeRefusal, Relay
from pdcluster_router.requests.request import LARGE_BODY_BYTES, BacklogShare, ClientRequest
from pdcluster_router.requests.reservation import ReservationCalls, has_pushed_kv, refusal_of
from pdcluster_router.services import Services
from pdcluster_router.telemetry import metrics
from pdcluster_router.telemetry.failures import FailureKind
from pdcluster_router.telemetry.stream_gaps import StreamGaps


class Exchange:
    """One request. Event loop only."""

    def __init__(self, services: Services, cycle: HotCycle, request: ClientRequest) -> None:
        """The request has been admitted: it holds its share of the backlog of the engines that will prefill it."""
        now = services.now()
        self._services, self._request = services, request
        self._pairing = Pairing(
            services.new_transfer_id(),
            request.timeouts,
            request.terms.retries,
            now=now,
            began_at=request.received_at,
            with_transfer=request.has_transfer,
        )
        self.record = cycle.teller = Record(services, request, self._pairing.transfer_id, now)
        self.first_byte = self.record.first_byte  # As RelayOwner, without a call between.
        self._cycle = cycle
        self._relay = Relay(self, cycle, request.api, services.dialect.given_up, now=now)
        self._decode = DecodeLeg(request, services.answers.expected(request.body.max_answer_tokens))
        self.calls = ReservationCalls(self._reservation_lost)
        """Decode's reservation, and the outcome for decode, as far as they are known."""
        self._attempts = PrefillAttempts(services, request, self._prefill_ended)
        self._share = BacklogShare(services, request)
        self._verdict = UNDECIDED
        self._prefill_reason = "no prefill engine is there to ask"
        """The last failure of prefill: the reason if no prefill engine is left. Kept for the next decode engine too."""
        self._prefill_failure = ""
        """Why prefill has failed for good for this decode engine; empty: it has not."""
        self._set_timer(now)

    def start(self) -> None:
        """Sends the request to decode. The cycle is ours until its answer is over."""
        self._cycle.owner = self
        self._services.running.add(self)
        self._services.transfers[self._pairing.transfer_id] = self
        self._send_to_decode()

    def break_off(self) -> None:
        """Ends the request after a bug of ours: gives all back, and writes the record. The client has an answer."""
        self._share.move(None)
        self._close()

    @property
    def is_done(self) -> bool:
        return self._pairing.phase is Phase.DONE  # The client has decode's whole answer, and prefill is over.

    # What the router and the metaserver say (Running).

    def stop(self, error: ApiError) -> None:
        self.record.failed(FailureKind.STOPPED, DOING[self._pairing.phase])
        self._verdict = Verdict(failed(error.message), error, metrics.Outcome.LOST)
        self._handle(Event.GIVEN_UP)

    def reserve(self, reservation: Posted, cycle: HotCycle) -> PrefillOutcome | None:
        if refusal := refusal_of(reservation, self.calls, self._pairing, self._request.terms.on_prefill_failure):
            self.record.failed(FailureKind.RESERVATION_REFUSED, refusal.reason)
            return refusal
        is_first = self.calls.reservation is None
        is_lost = reservation.lost_attempt == self._pairing.attempt
        if is_lost:
            self.calls.reopen()
        outcome = self.calls.join(reservation, cycle)
        if is_first:
            self.record.reserved(reservation)
            self._decode.recount(reservation.num_prompt_tokens)
            self._share.recount(reservation.num_prompt_tokens - reservation.remote_cached_tokens)
            self._handle(Event.RESERVED)
        elif is_lost:
            self._attempt_failed(Event.ATTEMPT_LOST, FailureKind.ATTEMPT_LOST, reservation.lost_reason, Blame.PERHAPS)
        return outcome

    def prefills_locally(self, said: LocalPrefill) -> None:
        if self._pairing.phase is not Phase.AWAITING_RESERVATION:
            return  # Decode's answer has begun, or decode says this twice.
        self.record.prefills_locally(said)
        self._decode.recount(said.num_prompt_tokens)
        self._share.recount(said.num_local_tokens)
        self._handle(Event.PREFILLS_LOCALLY)

    def _reservation_lost(self) -> None:
        self.record.failed(FailureKind.RESERVATION_LOST, "decode hung up on the metaserver")
        if self._services.dialect.must_hold_call:
            self._handle(Event.RESERVATION_LOST)
        else:
            self.calls.reopen()  # Decode goes on without its call: prefill will still tell the outcome.

    # What the client's connection says (CycleOwner).

    def client_gone(self) -> None:
        result = self.record.client_gone(DOING[self._pairing.phase], is_withdrawn=self._cycle.is_withdrawn)
        self._verdict = Verdict(failed("the client has left"), self._verdict.error, result)
        self._relay.stop()
        self._handle(Event.CLIENT_GONE)

    def pause(self) -> None:
        self._relay.pause()

    def resume(self) -> None:
        self._relay.resume()

    # What decode's answer says (RelayOwner).

    def begins(self) -> StreamGaps | None:
        self._decode.began()
        if self._request.has_transfer and has_pushed_kv(self.calls, self._pairing.phase):
            self._attempts.succeeded()
        self._handle(_FIRST_BYTE)
        return self.record.begins()

    def answered(self, status: int, end: bytes | bytearray) -> None:
        self._decode.succeeded()
        if not self._request.api.is_pooling:
            self._services.answers.saw(self._relay.num_bytes, is_stream=self._request.body.is_stream)
        self.record.answered(status, _OK, end=end)
        self._handle(_DECODE_DONE)

    def refused(self, refusal: DecodeRefusal) -> None:
        # vLLM says no more than "Internal server error" of a request whose KV did not come.
        is_prefills_fault = refusal.status >= 500 and bool(self._prefill_failure)
        error = prefill_failed(self._prefill_failure) if is_prefills_fault else refusal
        self._verdict = Verdict(failed("decode answered an error"), error, metrics.Outcome.ENGINE_ERROR)
        if is_prefills_fault or refusal.is_final or refusal.status not in RETRIED_STATUSES:
            self._decode.refused(refusal.status)
            self._handle(Event.DECODE_REFUSED)
        else:
            self._decode.failed(Blame.NOBODY if is_overloaded(refusal) else Blame.PERHAPS)
            self.record.failed(FailureKind.DECODE_ERROR, f"it answered {refusal.status}", self._decode.name)
            self._handle(Event.DECODE_FAILED)

    def decode_lost(self, lost: ResponseLost) -> None:
        if self._prefill_failure and lost.may_be_told:
            self.refused(DecodeRefusal(500, b"", b""))
            return
        name, reason = self._decode.name, scrub(lost.reason)
        error = decode_lost(name, reason)
        if not lost.is_stale:
            self._decode.failed(blame_for(lost))
        if self._pairing.is_at_start and self._decode.may_send_again(lost):
            self.record.failed(FailureKind.DECODE_UNREACHED, reason, name)
            error = no_engine("decode", f"{name}: {reason}")
            self._verdict = Verdict(failed(error.message), error, metrics.Outcome.UNAVAILABLE)
            self._renew_transfer()
            self._send_to_decode()
            return
        self.record.failed(FailureKind.DECODE_LOST, reason, name)
        self._verdict = Verdict(failed(error.message), error, metrics.Outcome.LOST)
        self._handle(Event.DECODE_FAILED)

    # What prefill's answer says.

    def _prefill_ended(self, failure: str | None, blame: Blame, said: PrefillAnswer) -> None:
        seconds = self.record.prefill_replied(said, is_well=failure is None)
        self._attempts.abort()
        if failure is None:
            self._attempts.replied(seconds)
            self._handle(Event.PREFILL_DONE)
        else:
            self._attempt_failed(Event.PREFILL_FAILED, FailureKind.PREFILL_FAILED, failure, blame)

    def _handle(self, event: Event, no_kv: str | None = None) -> None:
        """``no_kv``: why an attempt brought no KV. It is noted if prefill has failed for good, before the row ends."""
        pairing = self._pairing
        commands = pairing.handle(event, now=self._services.now())
        if no_kv is not None and pairing.phase in _WITHOUT_KV and not self._prefill_failure:
            self._prefill_failure = no_kv
            self.record.failed(FailureKind.PREFILL_EXHAUSTED, no_kv)
        for command in commands:
            _CARRY_OUT[command](self)
        phase = pairing.phase
        if (role := WORK.get(phase)) is not self._share.role:
            self._share.move(role)
        if phase is _DECODING:  # Decode answers and prefill is over: nothing is sent again.
            self._cycle.forget()
            num_bytes = self._cycle.num_body_bytes + len(self._request.headers)
            if num_bytes > LARGE_BODY_BYTES or self._request.body.is_stream:
                self._forget_body()
        elif phase in TERMINAL:
            self._close()

    # Time.

    def _set_timer(self, now: float) -> None:
        # Capped at one prefill timeout, so that a prefill that starts meanwhile is not missed; at a quarter of the idle
        # timeout, so that no byte of an answer has to look at the clock; and at ``gone_s``, for engines that are gone.
        timeouts = self._request.timeouts
        delay_s = min(self._pairing.deadline - now, timeouts.prefill_s, timeouts.idle_s / 4, timeouts.gone_s)
        self._timer = self._services.call_later(delay_s, self._check_deadline)

    def _check_deadline(self) -> None:
        """The timer has fired: a deadline has passed, or has moved on since it was set."""
        now = self._services.now()
        if self._relay.has_moved(now=now):
            self._pairing.heard(now=now)
        event = self._pairing.late_event(now=now)
        if event is Event.PREFILL_TIMED_OUT:
            reason = f"{self._attempts.engine_name} did not answer in time"
            self._attempt_failed(event, FailureKind.PREFILL_TIMEOUT, reason, Blame.ENGINE)
        elif event is Event.STALLED:
            self._stalled()
        elif event is not None:
            self._time_is_over(now - self._request.received_at)
        else:
            self._look_at_engines(now)
        if not self._pairing.is_over:
            self._timer.cancel()  # A try with another decode engine has set a timer.
            self._set_timer(self._services.now())

    def _look_at_engines(self, now: float) -> None:
        """Gives up calls to engines that are gone but have not hung up, or take up nothing."""
        waits = self._pairing.phase is Phase.AWAITING_RESERVATION and self._pairing.may_ask_another_decode(now)
        may_leave = waits and (self._request.body.is_stream or self._services.dialect.must_hold_call)
        if why := self._decode.why_lost(self._relay.quiet_since, now=now, may_leave=may_leave):
            self._relay.lose(why)
        if not self._pairing.is_over:
            self._attempts.look()

    def _stalled(self) -> None:
        """Ends a request without a byte of the answer for too long: decode sends none, or the client takes none."""
        is_client = self._relay.is_paused
        error = stalled(self._decode.name, self._request.timeouts.idle_s, is_client=is_client)
        kind = FailureKind.CLIENT_STALLED if is_client else FailureKind.DECODE_STALLED
        self.record.failed(kind, error.message, self._decode.name)
        self._decode.failed(Blame.NOBODY if is_client else Blame.ENGINE)
        self._verdict = Verdict(failed(error.message), error, metrics.Outcome.TIMEOUT)
        self._handle(Event.STALLED)

    def _time_is_over(self, seconds: float) -> None:
        doing = DOING[self._pairing.phase]
        if seconds >= self._request.timeouts.first_byte_s and self._pairing.phase not in NOT_DECODES_FAULT:
            # Without its call decode cannot say that a push has failed, so prefill may be to blame.
            is_push = self._pairing.phase is Phase.AWAITING_ANSWER and not self._services.dialect.must_hold_call
            self._decode.failed(Blame.NOBODY if is_push else Blame.ENGINE)
        error = deadline_passed(seconds, doing)
        self.record.failed(FailureKind.DEADLINE, doing)
        self._verdict = Verdict(failed(error.message), error, metrics.Outcome.TIMEOUT)
        self._handle(Event.REQUEST_TIMED_OUT)

    # Decode.

    def _start_decode(self) -> None:
        """Sends the whole request to another decode engine. Deadlines and failed engines stay as they are."""
        self._relay.close()
        now = self._services.now()
        self._relay = Relay(self, self._cycle, self._request.api, self._services.dialect.given_up, now=now)
        self.calls.close()
        self.calls = ReservationCalls(self._reservation_lost)
        self._prefill_failure = ""
        self._renew_transfer()
        self._timer.cancel()
        self._set_timer(now)
        self._send_to_decode()

    def _send_to_decode(self) -> None:
        if not self._decode.place():
            self.record.failed(FailureKind.NO_DECODE, "every decode engine that may be asked was tried")
            self._handle(Event.GIVEN_UP)  # With the last verdict: the client learns of the last failure.
            return
        self.record.decode_sent(self._decode.engine)
        line = self._services.dialect.transfer_line(self._pairing.transfer_id)
        if self._request.trace is not None:
            line += self._request.trace.next_line()
        has_transfer, wants = self._request.has_transfer, self._request.terms.wants_receipt
        params = self._services.decode_params(self._pairing, wants_receipt=wants) if has_transfer else None
        self._relay.begin(self._decode.send(params, line, self._relay))

    def _renew_transfer(self) -> None:
        """Gives the request a new transfer id, so that late calls of the first try are not taken for the second's."""
        del self._services.transfers[self._pairing.transfer_id]
        self._pairing.restart(self._services.new_transfer_id(), now=self._services.now())
        self.record.renewed(self._pairing.transfer_id)
        self._services.transfers[self._pairing.transfer_id] = self

    # Prefill.

    def _attempt_failed(self, event: Event, kind: FailureKind, reason: str, blame: Blame) -> None:
        """One attempt is over without KV: starts the next one, or ends prefill."""
        self._prefill_reason = scrub(reason) or "no reason was given"
        self.record.failed(kind, self._prefill_reason, self._attempts.engine_name)
        self._attempts.failed(blame)
        is_spoiled = self._pairing.phase is Phase.PREFILLING and self._services.dialect.spoils(event, blame)
        if is_spoiled and self._attempts.has_another(self._decode.revision):
            self._decode.spare()
            event = Event.DECODE_FAILED  # The whole request is sent again, so that other blocks are filled.
        self._no_kv(event)

    def _no_kv(self, event: Event) -> None:
        """Handles ``event``: decode or the client may be told why there is no KV."""
        reason = self._prefill_reason
        outcome = failed(reason, self._request.terms.on_prefill_failure)
        self._verdict = Verdict(outcome, prefill_failed(reason), metrics.Outcome.PREFILL_FAILED)
        self._handle(event, reason)

    def _start_prefill(self) -> None:
        reservation = self.calls.reservation
        assert reservation is not None
        attempt = self._pairing.attempt
        if self._attempts.start(reservation, attempt, self._pairing.transfer_deadline, self._decode.revision):
            self.record.prefill_sent(attempt, self._attempts.engine_name)
        elif not self._request.terms.retries.recomputes and self._decode.leave_revision():
            self._prefill_failure = "no prefill engine of this revision is left, and another one has a pair"
            self.record.failed(FailureKind.PREFILL_EXHAUSTED, self._prefill_failure, self._decode.name)
            self._no_kv(Event.DECODE_FAILED)
        else:
            self._no_kv(Event.NO_PREFILL_LEFT)  # All may have failed while another decode engine had the request.

    # The end.

    def _answer_error(self) -> None:
        error = self._verdict.error
        status = None if self._cycle.has_started else error.status
        if isinstance(error, DecodeRefusal):
            self._relay.refuse(error)
        else:
            self._relay.fail(error)
        self.record.answered(status, self._verdict.result, error)

    def _close(self) -> None:
        """The pairing is over: gives back all that the request holds."""
        services = self._services
        if self not in services.running:
            return
        services.running.discard(self)
        services.transfers.pop(self._pairing.transfer_id, None)
        self._timer.cancel()
        self._attempts.close()
        self._decode.close()
        self.record.write()
        self.calls.close()
        self._relay.close()
        # Both refer to us. To find such cycles took Python's garbage collector a tenth of the time of a request.
        del self._relay, self._attempts

    def _forget_body(self) -> None:
        """Frees the memory of a large body and its reservation: the request may last as long as its answer."""
        self.calls.forget_blocks()
        self._request = self._decode.request = self._attempts.request = self._request.without_body()


_WITHOUT_KV: Final = (Phase.LOCAL_PREFILL, Phase.FAILED)
_DECODING, _FIRST_BYTE, _DECODE_DONE, _OK = Phase.DECODING, Event.FIRST_BYTE, Event.DECODE_DONE, metrics.Outcome.OK
"""Module constants, because each request reads them: ``relay.py`` says why."""
_CARRY_OUT: Final[dict[Command, Callable[[Exchange], None]]] = {
    Command.START_PREFILL: Exchange._start_prefill,
    Command.ABORT_PREFILL: lambda exchange: exchange._attempts.abort(),
    Command.START_DECODE: Exchange._start_decode,
    Command.ABORT_DECODE: lambda exchange: exchange._decode.leave(),
    Command.REPLY_OK: lambda exchange: exchange.calls.reply(succeeded(exchange._pairing.attempt)),
    Command.REPLY_FAILED: lambda exchange: exchange.calls.reply(exchange._verdict.outcome),
    Command.ANSWER_ERROR: Exchange._answer_error,
    Command.ANSWER_TIMEOUT: Exchange._answer_error,
}
