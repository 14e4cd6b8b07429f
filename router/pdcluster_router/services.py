"""The services that every request shares: engines, running transfers, clock, secret, metrics, trace. One per process.

Built by ``Router``; holds no rule about requests.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import UNSET

from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.launch import RouterPolicy
from pdcluster_protocol.metaserver import Action, PrefillOutcome
from pdcluster_protocol.params import DecodeParams, LocalPrefill, Reservation
from pdcluster_protocol.secret import Secret
from pdcluster_router.core.apis.openai_errors import ApiError
from pdcluster_router.core.clients.admission import Admission
from pdcluster_router.core.clients.model_admissions import ModelAdmissions
from pdcluster_router.core.engines.load import AnswerLength
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.engines.placement import Policy
from pdcluster_router.core.engines.policies.affinity import affinity
from pdcluster_router.core.engines.policies.least_tokens import least_tokens
from pdcluster_router.core.requests.dialect import Dialect, PdclusterDialect, Posted
from pdcluster_router.core.requests.pairing import Pairing, Retries
from pdcluster_router.core.requests.vllm_ascend import VllmAscendDialect
from pdcluster_router.core.telemetry.request_trace import SampledTrace
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.engine_file import engine_file_of
from pdcluster_router.engines.model_terms import ModelTerms, size_queues
from pdcluster_router.engines.roster import Roster, Terms
from pdcluster_router.engines.trust import EngineTrust
from pdcluster_router.http.connections import PoolLimits
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.http.handshakes import Handshakes
from pdcluster_router.processes.seat import Seat
from pdcluster_router.processes.shared_loads import SharedLoads
from pdcluster_router.settings.forms import Discovery, EngineDialect, UnknownModels
from pdcluster_router.settings.router_settings import Settings
from pdcluster_router.telemetry.failures import Failures
from pdcluster_router.telemetry.kept import Kept, KeptRow
from pdcluster_router.telemetry.metrics import EngineSample, Metrics
from pdcluster_router.telemetry.span_start import span_export_of
from pdcluster_router.telemetry.trace import TraceFile

if TYPE_CHECKING:
    from pdcluster_router.engines.discovery import EngineDiscovery, Tell

POLICIES: Final[dict[RouterPolicy, Policy]] = {
    RouterPolicy.LEAST_TOKENS: least_tokens,
    RouterPolicy.AFFINITY: affinity,
}


class Recorded(Protocol):
    """The record of a request."""

    @property
    def names(self) -> tuple[str, str]:
        """The request's id and its transfer id."""
        ...

    def row(self) -> KeptRow:
        """The row for ``pdcluster why``."""
        ...

    def unanswered(self) -> Sequence[KeptRow]:
        """The rows of the parts that the request waits for. Empty: it waits for none, or has no parts."""
        ...


class Running(Protocol):
    """A request that has not ended: the interface for calls to the metaserver and for the router's shutdown.

    ``Exchange`` is the only implementation. This file may not import it, for imports point inwards.
    """

    @property
    def record(self) -> Recorded:
        """The record of the request so far."""
        ...

    def reserve(self, reservation: Posted, cycle: HotCycle) -> PrefillOutcome | None:
        """The outcome, if it is known or the reservation is refused. None: ``cycle`` gets the outcome later."""
        ...

    def prefills_locally(self, said: LocalPrefill) -> None:
        """The decode engine computes the missing tokens itself: the request needs no prefill engine."""
        ...

    def stop(self, error: ApiError) -> None:
        """Ends the request now; its client gets ``error``."""
        ...


class Services:
    """Shared by all requests of one router. Event loop only; call ``close`` at the end."""

    def __init__(self, settings: Settings, secret: Secret, seat: Seat | None = None) -> None:
        """``seat``: of this process, if the router has several."""
        self.settings = settings
        self.secret = secret
        self.dialect = _dialect_of(settings, secret)
        self.metrics = Metrics()
        self.failures = Failures(self.metrics.failed, self.now)
        self.trace = TraceFile(settings.trace_file, self.metrics.trace_lost.inc)
        self.kept = Kept(settings.kept_requests_bytes)
        self.spans = span_export_of(settings, self.metrics.spans_lost.inc)
        """None: this router makes no spans."""
        self.transfers: dict[TransferId, Running] = {}
        """The running requests by transfer id, for calls to the metaserver."""
        self.running: set[Running] = set()
        self.divided: set[Recorded] = set()
        """The records of running requests that are served in parts. The parts are in ``running``."""
        self.answers = AnswerLength()
        self.admissions: ModelAdmissions[Any] = ModelAdmissions(lambda: _admission_of(self.settings))
        """By the role of the engines that compute the prompt, and by model. The gate owns the requests in the
        queues."""
        self._room_listeners: list[Callable[[], None]] = []
        self._is_room_told = False
        self._metaserver_url = settings.metaserver_url
        self._loop = asyncio.get_running_loop()
        self.handshakes = Handshakes(self._loop.call_soon)
        """The TLS handshakes on all ports and with all engines."""
        self.trust = EngineTrust(settings, self.handshakes, self.failures)
        self._pool_listeners: list[Callable[[], None]] = []
        self.roster = Roster(
            _pool_limits_in(settings),
            POLICIES[settings.policy],
            self._pool_changed,
            self.metrics.ejected,
            self.now,
            self.trust,
            None if seat is None else SharedLoads(seat.loads_file, seat.num_seats, seat.number),
        )
        self.engines = self.roster.engines
        self.terms = self._terms_in(settings)
        """The terms of a client's request that any engine may serve."""
        self.model_terms = ModelTerms(
            self.roster,
            self.terms,
            self.admissions,
            refuses_unknown=settings.unknown_models is UnknownModels.REFUSE,
            aliases=settings.models_by_alias,
        )
        self.discovery = _discovery_of(settings, self.roster.update, self.metrics.discovery_failed.inc)
        """None: Kubernetes is not asked."""
        self.engine_file = engine_file_of(lambda: self.settings, self.roster, self.metrics.discovery_failed.inc)
        """None: no file names the engines."""
        self._add_gauges()
        if settings.discovery is Discovery.STATIC:
            self.roster.update(_named_in(settings))

    def apply_settings(self, settings: Settings) -> None:
        """``settings`` hold from now on, for new requests; engines that are not named any more finish what they have.
        The gate takes them by itself."""
        self.settings = settings
        self.roster.limit(_pool_limits_in(settings))
        self.terms = self._terms_in(settings)
        self.model_terms.apply_settings(
            self.terms,
            refuses_unknown=settings.unknown_models is UnknownModels.REFUSE,
            aliases=settings.models_by_alias,
            now_unix_s=self.unix_now(),
        )
        if self.roster.policy is not (policy := POLICIES[settings.policy]):
            self.roster.use(policy)
        if settings.discovery is Discovery.STATIC:
            self.roster.update(_named_in(settings))

    def _terms_in(self, settings: Settings) -> Terms:
        roster, retries = self.roster, self.dialect.retries(_retries_in(settings))
        return Terms(roster.place_decode, roster.place_prefill, retries, self.admissions.shared)

    def _add_gauges(self) -> None:
        """The metrics look here when they are asked."""
        self.metrics.watch_homes(self.roster.tallies)
        self.metrics.watch_in_flight(lambda: len(self.running) + self.num_queued)
        self.metrics.watch_engines(lambda: [_sample_of(engine) for engine in self.all_engines()])
        if (source := self.discovery or self.engine_file) is not None:
            self.metrics.watch_discovery(lambda: source.is_current)

    def on_room(self, tell: Callable[[], None]) -> None:
        """``tell`` is called each time that requests may leave the queue."""
        self._room_listeners.append(tell)

    def on_pool_change(self, tell: Callable[[], None]) -> None:
        """``tell`` is called each time that engines come, go or change, their health included."""
        self._pool_listeners.append(tell)

    def all_engines(self) -> list[Engine]:
        return self.roster.all_engines()

    def new_transfer_id(self) -> TransferId:
        """A random id of 128 bits: unique, and impossible to guess."""
        return TransferId(os.urandom(16).hex())

    def decode_params(self, pairing: Pairing, *, wants_receipt: bool) -> DecodeParams | bytes:
        """The transfer parameters for the decode engine."""
        params = DecodeParams(
            metaserver=self._metaserver_url,
            transfer_id=pairing.transfer_id,
            attempt=pairing.attempt,
            deadline_ms=self._left_ms(pairing.transfer_deadline),
            wants_receipt=wants_receipt or UNSET,
        )
        return self.dialect.decode_params(params)

    def prefill_params(self, reservation: Posted, attempt: Attempt, deadline: float) -> Reservation | bytes:
        """The transfer parameters for the prefill engine of ``attempt``. ``deadline``: monotonic seconds."""
        return self.dialect.prefill_params(reservation, attempt, self._left_ms(deadline))

    @property
    def num_queued(self) -> int:
        """Requests that wait to enter."""
        return sum(admission.num_queued for admission in self.admissions)

    def make_room(self) -> None:
        """The gate looks at its queue in the next turn of the event loop."""
        if not self._is_room_told:
            self._is_room_told = True
            self._loop.call_soon(self._tell_room)

    now: Final = staticmethod(time.monotonic)
    """Monotonic seconds. Not the loop's time: uvloop's clock has steps of a millisecond. This is the bare function,
    because each request calls it up to 20 times."""

    unix_now: Final = staticmethod(time.time)
    """Seconds since 1970."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Calls ``callback`` in ``delay_s`` seconds (below 0: 0), or slightly earlier: it must check the clock."""
        return self._loop.call_later(max(0.0, delay_s), callback)

    def tell_spans(self, trace: SampledTrace, row: KeptRow, received_at: float, num_parts: int = 0) -> None:
        """A sampled request has ended: its spans are sent. ``received_at``: monotonic seconds."""
        if self.spans is not None:
            arrived_at_unix_s = self.unix_now() - self.now() + received_at
            self.spans.add(trace.ids, row, arrived_at_unix_s, num_parts)

    async def close(self) -> None:
        if self.engine_file is not None:
            self.engine_file.close()
        await self.roster.close()
        self.trace.close()
        if self.spans is not None:
            self.spans.close()

    def _tell_room(self) -> None:
        self._is_room_told = False
        for tell in self._room_listeners:
            tell()

    def _left_ms(self, deadline: float) -> int:
        return max(1, int((deadline - self.now()) * 1000))

    def _pool_changed(self) -> None:
        """Adapts the backlogs' limits and the models' terms to the usable engines, and tells the listeners."""
        self.model_terms.forget()
        size_queues(self.admissions, self.roster)
        self.make_room()
        for tell in self._pool_listeners:
            tell()


def _dialect_of(settings: Settings, secret: Secret) -> Dialect:
    if settings.engine_dialect is EngineDialect.VLLM_ASCEND:
        return VllmAscendDialect()
    return PdclusterDialect(secret)


def _pool_limits_in(settings: Settings) -> PoolLimits:
    return PoolLimits(settings.max_engine_connections, settings.connect_timeout_s, settings.engine_idle_s)


def _admission_of(settings: Settings) -> Admission[Any]:
    return Admission(
        engine_tokens=settings.max_prefill_backlog_tokens,
        max_queued=settings.max_queued_requests,
        queue_s=settings.queue_timeout_s,
    )


def _retries_in(settings: Settings) -> Retries:
    recomputes = settings.on_prefill_failure is Action.RECOMPUTE
    return Retries(settings.max_prefill_attempts, settings.max_decode_attempts, recomputes=recomputes)


def _named_in(settings: Settings) -> list[Member]:
    """The engines that the flags name: all have the same revision."""
    prefills = [Member(url, Role.PREFILL) for url in settings.prefill_urls]
    return prefills + [Member(url, Role.DECODE) for url in settings.decode_urls]


def _sample_of(engine: Engine) -> EngineSample:
    is_up = engine.is_healthy if engine.state.was_ready else None  # else each one that loads weights were down
    is_ejected = engine.breaker.is_ejected
    names = (engine.role.value, engine.url, engine.revision, engine.state.value)
    return EngineSample(*names, is_up, is_ejected, engine.answered)


def _discovery_of(settings: Settings, tell: Tell, count_failure: Callable[[], None]) -> EngineDiscovery | None:
    """The discovery that the settings ask for; None: settings or a file name the engines. Imported only where it is
    asked for: its client of the API server, aiohttp, costs 9 MB and 0.2 s of CPU."""
    if settings.discovery is not Discovery.KUBERNETES:
        return None
    from pdcluster_router.engines.discovery import kubernetes_discovery

    return kubernetes_discovery(settings, tell, count_failure)
