"""One request in the router: the real ``Pairing`` and ``ReservationCalls``, with what ``exchange.py`` does besides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, cast

from model.link import Output
from model.plan import DEADLINE_MS, SECRET, Plan
from pdcluster_connector.core.sending import PushKey
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.metaserver import Action, PrefillOutcome, decode_outcome, failed, succeeded
from pdcluster_protocol.params import Reservation, for_attempt
from pdcluster_router.core.requests.pairing import Command, Event, Pairing, Phase, Retries, Timeouts
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.http.cycle_ends import CycleOwner
from pdcluster_router.requests.reservation import ReservationCalls, refusal_of

FAILED: Final = failed("", Action.RECOMPUTE)


class Call:
    """One open call of decode's, in place of the HTTP cycle that it has in the router."""

    def __init__(self) -> None:
        self.owner: CycleOwner | None = None
        self.answers: list[PrefillOutcome] = []

    def answer(self, status: int, body: bytes) -> None:
        outcome = decode_outcome(body)
        self.answers.append(outcome if outcome.is_ok else FAILED)


@dataclass(slots=True)
class RouterSide:
    """One request. Its calls are those that wait for an outcome."""

    transfer: TransferId
    pairing: Pairing
    calls: ReservationCalls
    engine: int | None = None
    excluded: set[int] = field(default_factory=set)
    leg: PushKey | None = None
    """The prefill order that runs."""
    open: list[Call] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """Filled by ``reservation_lost``, which ``ReservationCalls`` calls."""
    is_dead: bool = False

    def post(self, plan: Plan, reservation: Reservation) -> tuple[Output, ...]:
        """A call of decode's is here."""
        if self.is_dead or self.pairing.is_over:
            return (("outcome", FAILED),)
        SECRET.check(reservation.token, reservation.transfer_id, reservation.attempt, reservation.deadline_ms)
        if refusal := refusal_of(reservation, self.calls, self.pairing, Action.RECOMPUTE):
            return (("outcome", refusal if refusal.is_ok else FAILED),)
        is_first = self.calls.reservation is None
        is_lost = reservation.lost_attempt == self.pairing.attempt
        if is_lost:
            self.calls.reopen()
        call = Call()
        outcome = self.calls.join(reservation, cast("HotCycle", call))
        if outcome is None:
            self.open.append(call)
        out: tuple[Output, ...] = () if outcome is None else (("outcome", outcome),)
        if is_first:
            out += self._handle(plan, Event.RESERVED)
        elif is_lost:
            self._exclude()
            out += self._handle(plan, Event.ATTEMPT_LOST)
        return out

    def hangup(self, plan: Plan) -> tuple[Output, ...]:
        """Decode has cut every call of this request."""
        for call in [call for call in self.open if not call.answers]:
            if call.owner is not None:
                call.owner.client_gone()
        self.open = []
        return self._hear_loss(plan)

    def prefilled(self, plan: Plan, key: PushKey, is_ok: bool) -> tuple[Output, ...]:
        """A prefill engine has answered."""
        if self.leg != key or self.is_dead:
            return ()
        self.leg = None
        if not is_ok:
            self._exclude()
        return self._handle(plan, Event.PREFILL_DONE if is_ok else Event.PREFILL_FAILED)

    def prefill_late(self, plan: Plan) -> tuple[Output, ...]:
        self._exclude()
        return self._handle(plan, Event.PREFILL_TIMED_OUT)

    def client_gone(self, plan: Plan) -> tuple[Output, ...]:
        return self._handle(plan, Event.CLIENT_GONE)

    def answered(self, plan: Plan) -> tuple[Output, ...]:
        """Decode has answered, from the first byte to the last."""
        if self.is_dead or self.pairing.is_over:
            return ()
        return self._handle(plan, Event.FIRST_BYTE) + self._handle(plan, Event.DECODE_DONE)

    def decode_died(self, plan: Plan) -> tuple[Output, ...]:
        if self.is_dead or self.pairing.is_over:
            return ()
        self.hangup(plan)
        return self._handle(plan, Event.DECODE_FAILED)

    def crash(self) -> tuple[Output, ...]:
        """The process is gone: every connection of its closes."""
        out: tuple[Output, ...] = (("abort_decode",),)
        if self.leg is not None:
            out += (("abort", self.engine, self.leg),)
        out += tuple(("outcome", FAILED) for call in self.open if not call.answers)
        self.is_dead, self.leg, self.open = True, None, []
        self.calls = ReservationCalls(self.reservation_lost)
        return out

    def reservation_lost(self) -> None:
        """For ``ReservationCalls``."""
        self.lost.append(1)

    def _hear_loss(self, plan: Plan) -> tuple[Output, ...]:
        was_lost, self.lost = bool(self.lost), []
        may = self.pairing.phase in (Phase.PREFILLING, Phase.ANSWERING, Phase.TRAILING)
        return self._handle(plan, Event.RESERVATION_LOST) if was_lost and may else ()

    def _exclude(self) -> None:
        if self.engine is not None:
            self.excluded.add(self.engine)

    def _handle(self, plan: Plan, event: Event) -> tuple[Output, ...]:
        out: tuple[Output, ...] = ()
        for command in self.pairing.handle(event, now=0.0):
            out += self._carry_out(plan, command)
        self.open = [call for call in self.open if not call.answers]
        return out

    def _carry_out(self, plan: Plan, command: Command) -> tuple[Output, ...]:
        match command:
            case Command.START_PREFILL:
                return self._start_prefill(plan)
            case Command.ABORT_PREFILL:
                leg, self.leg = self.leg, None
                return (("abort", self.engine, leg),) if leg is not None else ()
            case Command.ABORT_DECODE:
                return (("abort_decode",),)
            case Command.REPLY_OK | Command.REPLY_FAILED:
                waiting = [call for call in self.open if not call.answers]
                self.calls.reply(succeeded(self.pairing.attempt) if command is Command.REPLY_OK else FAILED)
                return tuple(("outcome", call.answers[0]) for call in waiting if call.answers)
        return ()

    def _start_prefill(self, plan: Plan) -> tuple[Output, ...]:
        left = [number for number in range(plan.engines) if number not in self.excluded]
        if not left:
            return self._handle(plan, Event.NO_PREFILL_LEFT)
        assert isinstance(self.calls.reservation, Reservation)
        attempt = Attempt(self.pairing.attempt)
        order = for_attempt(
            self.calls.reservation, attempt, SECRET.mint(self.transfer, attempt, DEADLINE_MS), DEADLINE_MS
        )
        self.engine, self.leg = left[0], PushKey(order.transfer_id, order.attempt)
        return (("order", self.engine, self.leg, order.remote_boot_id),)


def make_router_side(plan: Plan, transfer: TransferId) -> RouterSide:
    retries = Retries(max_prefill_attempts=plan.engines, max_decode_attempts=1, recomputes=plan.recomputes)
    pairing = plan.cores.pairing(transfer, Timeouts(1e6, 1e6), retries, now=0.0)
    made = RouterSide(transfer, pairing, cast("ReservationCalls", None))
    made.calls = ReservationCalls(made.reservation_lost)
    return made
