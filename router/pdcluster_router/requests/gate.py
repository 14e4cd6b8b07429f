"""The way in: a request enters at once, waits for room, or is told when to come back.

``core/clients/admission.py`` decides which. A request that enters at once costs one addition. One timer, set to the
earliest deadline, serves all that wait. A request from the queue is started by the event loop, not from within the
request that made room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec.structs import replace

from pdcluster_protocol.labels import Role
from pdcluster_router.core.apis.openai_errors import ApiError, deadline_passed, draining, queue_full, queue_timeout
from pdcluster_router.core.clients.admission import Admission
from pdcluster_router.core.clients.fair_queue import KeyFlow
from pdcluster_router.core.clients.model_admissions import ModelAdmissions
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.requests.unserved import keep_turned_away
from pdcluster_router.services import Services
from pdcluster_router.telemetry.access_log import EndFacts
from pdcluster_router.telemetry.failures import Failure, FailureKind
from pdcluster_router.telemetry.metrics import Outcome

MIN_TICK_S: Final = 0.01
"""The timer rests this long between two looks at the queue, so that a crowd of deadlines does not cost a look each."""

_ROLES: Final = (Role.PREFILL, Role.DECODE)
Start = Callable[[HotCycle, ClientRequest], None]


class Gate:
    """Lets requests into the queues of one router, and out of them. Event loop only; ``drain`` empties it."""

    def __init__(self, services: Services, start: Start, flow_of: Callable[[str], KeyFlow]) -> None:
        """``start``: called with each request that enters. ``flow_of``: returns the flow of a client's name."""
        self._services = services
        self._start = start
        self._flow_of = flow_of
        self._admissions: ModelAdmissions[_Waiting] = services.admissions
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0
        services.on_room(self._admit)
        services.metrics.watch_queue(lambda: services.num_queued, *(partial(self._backlog_of, role) for role in _ROLES))
        services.metrics.watch_model_queues(self._admissions.lengths)

    def enter(self, cycle: HotCycle, request: ClientRequest) -> None:
        """The request is started, waits, or is answered with an error."""
        admission = request.terms.admissions[request.prefill_role]
        share = admission.share_of(request.body.estimated_prompt_tokens)
        if admission.enter(share):
            self._start(cycle, request)
            return
        self._queue(_Waiting(self, cycle, request, admission), share)

    def leave(self, waiting: _Waiting) -> None:
        """The client of a request in the queue has left, or the request is a part that was withdrawn."""
        if waiting.admission.leave(waiting):  # Else ``_admit``, ``_expire`` or ``drain`` counts the wait.
            self._waited(waiting, self._services.now())
        self._services.make_room()  # A request behind it may fit into the room.
        if waiting.cycle.is_withdrawn:
            self._ended(waiting, FailureKind.WITHDRAWN, Outcome.LOST, None)
        else:
            self._ended(waiting, FailureKind.CLIENT_GONE, Outcome.CLIENT_GONE, None)

    def waiting_with(self, request_id: str) -> list[ClientRequest]:
        """The requests of this id that wait. Costs a look at each waiting request."""
        waiters = [waiting for admission in self._admissions for waiting in admission.waiters]
        return [waiting.until_now() for waiting in waiters if waiting.request.request_id == request_id]

    def apply_keys(self) -> None:
        """The keys' weights and priorities have changed: they hold for the requests that wait, too."""
        now = self._services.now()
        for admission in self._admissions:
            admission.set_flows(self._flow_of, now=now)
        self._services.make_room()

    def apply_settings(self) -> None:
        """The settings have changed. Requests that wait keep their longest wait."""
        settings = self._services.settings
        for admission in self._admissions:
            admission.limit(
                engine_tokens=settings.max_prefill_backlog_tokens,
                max_queued=settings.max_queued_requests,
                queue_s=settings.queue_timeout_s,
                tokens_of=lambda waiting: waiting.request.body.estimated_prompt_tokens,
            )
        self._services.make_room()

    def drain(self) -> None:
        """Refuses all requests that wait."""
        if self._timer is not None:
            self._timer.cancel()
        now = self._services.now()
        for admission in self._admissions:
            for waiting in admission.clear():
                self._waited(waiting, now)
                waiting.cycle.keep_alive = False
                self._turn_away(waiting, FailureKind.DRAINING, draining(), Outcome.REJECTED)

    def _backlog_of(self, role: Role) -> int:
        return self._admissions.sum_of(role, lambda admission: admission.backlog_tokens)

    def _queue(self, waiting: _Waiting, share: int) -> None:
        admission, request, now = waiting.admission, waiting.request, self._services.now()
        if waiting.cycle.slot is not None:
            waiting.cycle.slot.waits_for_a_place()
        flow = self._flow_of(request.client)
        until = admission.queue(waiting, share, now=now, deadline=request.deadline, flow=flow)
        displaced = admission.displace_for(flow) if until is None else None
        if displaced is not None:
            until = admission.queue(waiting, share, now=now, deadline=request.deadline, flow=flow)
            waiting.cycle.displaces()
        if until is None:
            self._has_no_place(waiting, now)
            return
        waiting.cycle.owner = waiting
        waiting.first_turn = admission.turn_log.num_turns
        self._wake_by(until)
        self._services.make_room()  # It may be small enough to pass those before it.
        if displaced is not None:  # Last: its client's next request may be here already, and enters at once.
            self._waited(displaced, now)
            self._has_no_place(displaced, now)

    def _admit(self) -> None:
        now = self._services.now()
        for admission in self._admissions:
            next_turn = admission.turn_log.num_turns
            for turn, waiting in enumerate(admission.admit(now=now), start=next_turn):
                self._waited(waiting, now)
                if waiting.cycle.is_withdrawn:  # The part before it has just failed, and all others with it.
                    admission.give_back(admission.share_of(waiting.request.body.estimated_prompt_tokens))
                    continue
                waiting.cycle.owner = None
                self._start(waiting.cycle, waiting.until(turn))

    def _wake_by(self, deadline: float) -> None:
        if self._timer is not None:
            if self._wakes_at <= deadline:
                return
            self._timer.cancel()
        now = self._services.now()
        self._wakes_at = max(deadline, now + MIN_TICK_S)
        self._timer = self._services.call_later(self._wakes_at - now, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._services.now()
        for admission in self._admissions:
            retry_after_s = admission.retry_after_s(now=now)
            for waiting in admission.expire(now=now):
                self._waited_too_long(waiting, now, retry_after_s)
        self._services.make_room()
        deadlines = [admission.next_deadline() for admission in self._admissions]
        if left := [deadline for deadline in deadlines if deadline is not None]:
            self._wake_by(min(left))

    def _waited(self, waiting: _Waiting, now: float) -> None:
        """Counts the wait of a request that has left the queue."""
        request = waiting.request
        self._services.metrics.waited(request.client, now - request.received_at)

    def _waited_too_long(self, waiting: _Waiting, now: float, retry_after_s: int) -> None:
        self._waited(waiting, now)
        if now >= waiting.request.deadline:
            error = deadline_passed(now - waiting.request.received_at, "waiting to be admitted")
            self._turn_away(waiting, FailureKind.DEADLINE, error, Outcome.TIMEOUT)
        else:
            self._turn_away(waiting, FailureKind.QUEUE_TIMEOUT, queue_timeout(retry_after_s))

    def _has_no_place(self, waiting: _Waiting, now: float) -> None:
        """Refuses a request that got no place, or lost it to another key's. Its key's rates do not count it."""
        if waiting.cycle.slot is not None:
            waiting.cycle.slot.give_back(now)
        retry_after_s = waiting.admission.retry_after_s(now=now)
        self._turn_away(waiting, FailureKind.QUEUE_FULL, queue_full(retry_after_s))

    def _turn_away(
        self, waiting: _Waiting, kind: FailureKind, error: ApiError, outcome: Outcome = Outcome.OVERLOADED
    ) -> None:
        if waiting.cycle.is_withdrawn:
            return  # Another part of its request was turned away just before.
        self._ended(waiting, kind, outcome, error)
        waiting.cycle.answer_error(error)

    def _ended(self, waiting: _Waiting, kind: FailureKind, outcome: Outcome, error: ApiError | None) -> None:
        if not waiting.request.is_part:
            self._services.metrics.ended(outcome)
        now, trace_id = self._services.now(), waiting.request.trace_id
        waiting.cycle.teller = EndFacts(outcome=outcome, failures=(kind,), left_queue_at=now, trace_id=trace_id)
        admission = waiting.admission
        reason = f"{admission.num_queued} wait, the backlog is {admission.backlog_tokens} tokens"
        if kind is FailureKind.WITHDRAWN:
            self._services.failures.count(kind)  # The failure, or that the client left, was reported.
        else:
            self._services.failures.tell(Failure(kind, waiting.request.request_id, reason=reason))
        if self._services.kept.is_on or waiting.request.trace is not None:
            keep_turned_away(self._services, waiting.until_now(), kind, outcome, reason, error)


class _Waiting:
    """One request that waits for room."""

    __slots__ = ("_gate", "admission", "cycle", "first_turn", "request")

    def __init__(self, gate: Gate, cycle: HotCycle, request: ClientRequest, admission: Admission[_Waiting]) -> None:
        self._gate = gate
        self.admission = admission
        self.cycle = cycle
        self.request = request
        self.first_turn: int | None = None
        """The number of the queue's next turn when the request came; None: it has got no place."""

    def until(self, turn: int) -> ClientRequest:
        """The request, with the turns that others had before ``turn`` while it waited."""
        if self.first_turn is None:
            return self.request
        request = self.request
        return replace(request, turns_ahead=(request.prefill_role, self.first_turn, turn, request.terms.queue))

    def until_now(self) -> ClientRequest:
        return self.until(self.admission.turn_log.num_turns)

    def client_gone(self) -> None:
        self._gate.leave(self)

    def pause(self) -> None:
        """Nothing is being written."""

    def resume(self) -> None: ...
