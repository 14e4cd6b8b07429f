"""Decode engines bring their reservations here, and wait for the outcome of the prefill.

A decode engine may also say that it computes the missing tokens itself: then it waits for nothing. Such a call changes
nothing once the answer has begun.

An answer 200 carries an outcome. Every other status carries a failed outcome: 400 for a body that is no reservation,
403 for a call without a seal by the cluster's secret, or with a token of another cluster or attempt, 404 for an unknown
or ended transfer. A token is valid only while its transfer runs, so a replayed token is of no use.

The token covers a transfer and an attempt, not the place where the KV goes; the seal covers every byte of the body.
The router does not check that a call comes from the engine that has this transfer: an engine's calls may come from
another address than the one at which it is reached (a Service, another node of the engine), and holders of the secret
trust each other.

vLLM may submit a request twice with the same transfer parameters, so several calls can wait for one decision. A call
that reports a lost attempt opens the decision again: this call and every later one wait for a new outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Final

import msgspec

from pdcluster_protocol.ids import NO_ATTEMPT, TransferId
from pdcluster_protocol.metaserver import SEAL_HEADER, Action, PrefillOutcome, encode_outcome, failed, succeeded
from pdcluster_protocol.params import LocalPrefill
from pdcluster_router.core.apis.openai_errors import prefill_failed
from pdcluster_router.core.requests.dialect import FORBIDDEN, BadCall, LayerwiseCall, Posted
from pdcluster_router.core.requests.pairing import FIRST_ATTEMPT, Pairing, Phase
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.services import Services
from pdcluster_router.telemetry.failures import Failure, FailureKind

_SEAL: Final = SEAL_HEADER.encode()


def take_reservation(services: Services, cycle: HotCycle) -> None:
    """Hands the reservation to its transfer. The call is answered now, or waits for the outcome."""
    seal, body = cycle.head.fields.get(_SEAL, b""), cycle.take_body()
    try:
        call = services.dialect.call_in(seal, body, services.transfers)
    except BadCall as error:
        kind = FailureKind.BAD_TOKEN if error.status == FORBIDDEN else FailureKind.RESERVATION_REFUSED
        failure = Failure(kind, transfer_id=error.transfer_id, attempt=error.attempt, reason=str(error))
        _refuse(services, cycle, error.status, failure)
        transfer = services.transfers.get(TransferId(error.transfer_id))
        if transfer is not None and not services.dialect.must_hold_call:
            transfer.stop(prefill_failed(str(error)))  # Decode does not read the answer, and would wait.
        return
    if call is None:
        cycle.answer(200, encode_outcome(succeeded(FIRST_ATTEMPT)))
        return
    if isinstance(call, LocalPrefill):
        _take_local_prefill(services, cycle, call)
    else:
        _take(services, cycle, call)


def _take(services: Services, cycle: HotCycle, reservation: Posted) -> None:
    transfer = services.transfers.get(reservation.transfer_id)
    if transfer is None:
        reason = f"transfer {reservation.transfer_id} is not known here, or has ended"
        kind, attempt = FailureKind.RESERVATION_REFUSED, reservation.attempt
        failure = Failure(kind, transfer_id=reservation.transfer_id, attempt=attempt, reason=reason)
        _refuse(services, cycle, 404, failure)
        return
    outcome = transfer.reserve(reservation, cycle)
    if outcome is not None:
        cycle.answer(200, encode_outcome(outcome))


def _take_local_prefill(services: Services, cycle: HotCycle, said: LocalPrefill) -> None:
    """Answers at once. Decode's answer may end before this call is here, so an unknown transfer is no failure."""
    cycle.answer(200, encode_outcome(succeeded(FIRST_ATTEMPT)))
    transfer = services.transfers.get(said.transfer_id)
    if transfer is not None:
        transfer.prefills_locally(said)


def _refuse(services: Services, cycle: HotCycle, status: int, failure: Failure) -> None:
    services.failures.tell(failure)
    cycle.answer(status, encode_outcome(failed(failure.reason)))


class ReservationCalls:
    """One transfer's reservation and the calls that wait for its outcome. Owned by the exchange."""

    __slots__ = ("_digest", "_on_lost", "_waiters", "outcome", "reservation")

    def __init__(self, on_lost: Callable[[], None]) -> None:
        """``on_lost``: called when decode has hung up on every call before the outcome was known."""
        self.reservation: Posted | None = None
        self.outcome: PrefillOutcome | None = None
        """None: it is not known yet."""
        self._digest = b""
        self._on_lost: Callable[[], None] | None = on_lost
        self._waiters: list[_OpenCall] = []

    def fits(self, reservation: Posted) -> bool:
        """Whether this is the transfer's first reservation, or the same again. Prefill would not fill other blocks."""
        if self.reservation is None:
            return True
        if self._digest:
            return _digest_of(reservation) == self._digest
        return _blocks_of(reservation) == _blocks_of(self.reservation)

    def join(self, reservation: Posted, cycle: HotCycle) -> PrefillOutcome | None:
        """The outcome if it is known; None: ``cycle`` waits for it. ``fits`` must hold."""
        if self.reservation is None:
            self.reservation = reservation
        if self.outcome is None:
            self._waiters.append(_OpenCall(self, cycle))
        return self.outcome

    def reopen(self) -> None:
        """The outcome is open again: another attempt decides it."""
        self.outcome = None

    def reply(self, outcome: PrefillOutcome) -> None:
        """Answers the calls that wait with ``outcome``. Does nothing if the outcome was known already."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        waiters, self._waiters = self._waiters, []
        body = encode_outcome(outcome)
        for waiter in waiters:
            waiter.cycle.answer(200, body)

    def gone(self, waiter: _OpenCall) -> None:
        """Decode has cut off one call."""
        self._waiters.remove(waiter)
        if not self._waiters and self.outcome is None:
            self.outcome = failed("decode hung up on the metaserver")
            if self._on_lost is not None:
                self._on_lost()

    def forget_blocks(self) -> None:
        """No attempt can follow. Of the blocks and what prefill was told only a digest stays: a table of 100,000 tokens
        takes 250 KB, and an answer may last for hours."""
        if self.reservation is not None and not self._digest:
            self._digest = _digest_of(self.reservation)
            self.reservation = _without_blocks(self.reservation)

    def close(self) -> None:
        """The request is over: ``on_lost`` is not called any more."""
        self._on_lost = None


def _blocks_of(reservation: Posted) -> Posted:
    """The part that stays the same when decode posts again: all but the lost attempt and the time that is left."""
    return msgspec.structs.replace(reservation, lost_attempt=NO_ATTEMPT, lost_reason="", deadline_ms=0)


def _digest_of(reservation: Posted) -> bytes:
    return blake2b(msgspec.msgpack.encode(_blocks_of(reservation)), digest_size=16).digest()


def _without_blocks(reservation: Posted) -> Posted:
    if isinstance(reservation, LayerwiseCall):
        return msgspec.structs.replace(reservation, posted=b"")
    no_blocks = ((),) * len(reservation.remote_block_ids)
    return msgspec.structs.replace(reservation, remote_block_ids=no_blocks, token_ids=())


class _OpenCall:
    """One open call."""

    __slots__ = ("_calls", "cycle")

    def __init__(self, calls: ReservationCalls, cycle: HotCycle) -> None:
        self._calls = calls
        self.cycle = cycle
        cycle.owner = self

    def client_gone(self) -> None:
        self._calls.gone(self)

    def pause(self) -> None:
        """An outcome is one small write: there is nothing to hold back."""

    def resume(self) -> None: ...


def refusal_of(reservation: Posted, calls: ReservationCalls, pairing: Pairing, action: Action) -> PrefillOutcome | None:
    """Why this call cannot be taken; None: it can. ``action``: what decode shall do when prefill has failed."""
    lost = reservation.lost_attempt
    newest = NO_ATTEMPT if calls.reservation is None else pairing.attempt
    if reservation.attempt != FIRST_ATTEMPT:
        return failed(f"attempt {reservation.attempt} of this transfer is not running")
    if not calls.fits(reservation):
        return failed("this transfer has another reservation already")
    if lost > newest:
        return failed(f"attempt {lost} of this transfer was never made: the newest is {newest}")
    if not newest and pairing.phase is not Phase.AWAITING_RESERVATION:
        return failed("this request does not wait for a reservation any more")
    if lost and lost == newest and not pairing.may_lose_attempt:
        return _known_failure(calls) or failed("decode's answer has begun already", action)
    return None


def has_pushed_kv(calls: ReservationCalls, phase: Phase) -> bool:
    """Whether an answer that begins in ``phase`` has its KV from the newest attempt."""
    if calls.reservation is None:
        return False
    is_told = calls.outcome is not None and calls.outcome.is_ok
    return phase is Phase.PREFILLING or (phase is Phase.AWAITING_ANSWER and is_told)


def _known_failure(calls: ReservationCalls) -> PrefillOutcome | None:
    outcome = calls.outcome
    return outcome if outcome is not None and not outcome.is_ok else None
