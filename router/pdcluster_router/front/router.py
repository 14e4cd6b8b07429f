"""The router of one process: takes hot requests from the protocol, and owns the objects that they share.

A request passes ``RouterProtocol``, ``Router.dispatch``, ``gate.Gate`` and ``exchange.Exchange``. A reservation passes
``RouterProtocol``, ``Router.dispatch``, ``reservation.take_reservation`` and the exchange of its transfer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from pdcluster_protocol.metaserver import METASERVER_PATH
from pdcluster_protocol.networks import parse_network
from pdcluster_protocol.secret import Secret
from pdcluster_router.core.apis.client_apis import API_OF, REQUEST_PATHS
from pdcluster_router.core.apis.openai_errors import (
    ApiError,
    RefusedRequest,
    bad_request,
    draining,
    internal,
    no_room,
    stopped,
)
from pdcluster_router.core.apis.request_head import (
    ADDRESS_HEADERS,
    ID_HEADER,
    PER_CONNECTION,
    Headers,
    RequestHead,
    request_id_in,
)
from pdcluster_router.core.apis.rewrite import BadBody, ClientBody
from pdcluster_router.core.apis.trace_context import TRACE_HEADER, remains_of, trace_id_in
from pdcluster_router.core.clients.api_keys import KEY_HEADERS
from pdcluster_router.core.clients.client_address import ClientAddresses
from pdcluster_router.core.clients.room import Room
from pdcluster_router.engines.engine_file import EngineFile
from pdcluster_router.engines.models import Models
from pdcluster_router.engines.roster import Terms
from pdcluster_router.engines.trust import EngineTrust
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.front.access import Access
from pdcluster_router.front.callers import Callers, places_for
from pdcluster_router.front.certificates import (
    Certificate,
    certificate_of,
    internal_certificate_of,
    picker_certificate_of,
)
from pdcluster_router.front.clients import Clients, default_max_connections
from pdcluster_router.front.timeouts import TIMEOUT_HEADER, shortened, timeouts_in
from pdcluster_router.http.cycle import NO_HEAD, HotCycle
from pdcluster_router.http.cycle_ends import ClientConnection
from pdcluster_router.http.keep_alives import KeepAlives
from pdcluster_router.http.leavers import Leavers
from pdcluster_router.http.logged_cycle import LoggedCycle
from pdcluster_router.http.turns import FREE_BYTES, Rows
from pdcluster_router.processes.seat import Seat, internal_ports
from pdcluster_router.processes.siblings import Siblings
from pdcluster_router.requests.exchange import Exchange
from pdcluster_router.requests.fan_out import fan_out
from pdcluster_router.requests.gate import Gate
from pdcluster_router.requests.gateway import for_gateway
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.requests.reservation import take_reservation
from pdcluster_router.requests.unserved import keep_limited, keep_refused
from pdcluster_router.requests.verifier import Verifier
from pdcluster_router.services import Services
from pdcluster_router.settings.router_settings import Settings
from pdcluster_router.telemetry.access_log import AccessLog, EndFacts
from pdcluster_router.telemetry.failures import Failure, FailureKind
from pdcluster_router.telemetry.metrics import Outcome
from pdcluster_router.telemetry.sampling import Sampled, Sampling

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 256 << 10
"""The most that the loop reads at once. The last read of a call counts twice while it is decrypted."""
METASERVER: Final = METASERVER_PATH.encode()
INTERNAL_PATHS: Final = frozenset((METASERVER,))

NOT_FORWARDED: Final = frozenset(
    (
        *KEY_HEADERS,  # ``Access`` chooses the key that engines get.
        *ADDRESS_HEADERS,  # Engines need none. vLLM's server would log a made-up address: it believes loopback.
        b"accept-encoding",  # The first event of a stream must be readable; vLLM compresses nothing anyway.
        *PER_CONNECTION,
        b"x-data-parallel-rank",  # vLLM's, of one engine. Clients know none; prefill and decode may have other ranks.
        ID_HEADER,
        TIMEOUT_HEADER,
    )
)
_UNSAMPLED: Final = Sampled(None, NOT_FORWARDED)


class Router:
    """All requests of this process. Event loop only."""

    def __init__(self, settings: Settings, secret: Secret, seat: Seat | None = None) -> None:
        self.settings = settings
        self.siblings: Siblings | None = None
        """The other processes, while they answer. None: there are none."""
        self._internal_ports = internal_ports(settings.internal_port, seat)
        self.services = Services(settings, secret, seat)
        self.access = Access(settings)
        self.gate = Gate(self.services, self._start, self.access.flow_of)
        self.access.on_change = self.gate.apply_keys
        self.addresses = _addresses_in(settings)
        self.certificate = certificate_of(settings)
        """None: the client port is plain."""
        self.internal_certificate = internal_certificate_of(settings)
        """None: the internal port is plain."""
        self.picker_certificate = picker_certificate_of(settings)
        """None: the picker's port is plain."""
        certificates = (self.certificate, self.internal_certificate, self.picker_certificate, self.services.trust)
        self.watches = [*self.access.watches, *_watches_of(*certificates, self.services.engine_file)]
        """The watches of files that are read anew when they change."""
        self.verifier = Verifier(self.services, self.access.engine_line)
        self.models = Models(self.services.roster, self.services.now, self.services.model_terms.aliases)
        self.room = Room(settings.max_buffered_bytes)
        """For the bytes of requests whose answer has not begun."""
        self.clients = Clients(settings.max_connections or default_max_connections())
        self.callers = Callers(
            settings.max_internal_connections or places_for(self.clients.max_connections),
            self.room,
            settings.max_reservation_bytes + settings.max_header_bytes + _READ_BYTES,
            lambda reason: self.services.failures.tell(Failure(FailureKind.CROWDED_OUT, reason=reason)),
        )
        self.leavers = Leavers(asyncio.get_running_loop())
        self.keep_alives = KeepAlives(settings.keep_alive_s, self.services.now, self.services.call_later)
        self.access_log = _access_log_of(settings, self.services)
        """None: this router writes none."""
        self.services.metrics.watch_keys(self.access.uses, self.access.names)
        if any(expiries_of(certificates)):
            self.services.metrics.watch_certificate(lambda: min(expiries_of(certificates)))
        self.services.metrics.watch_keep_alives(lambda: self.keep_alives.num_comments)
        self.is_draining = False
        self.is_leaving = False
        """Whether each connection ends with its next answer, because another process takes the new ones."""
        self.num_asking = 0
        """Questions of clients that engines have now (``pass_on.py``), outside of ``services.running``."""
        spans = self.services.spans
        self._sampling = Sampling(settings.trace_sample_ratio, NOT_FORWARDED) if spans is not None else None
        """None: this router makes no spans."""
        self._on_refused = partial(keep_refused, self.services)
        self._rows = Rows(self._take, asyncio.get_running_loop().call_soon)
        self._stream_timeouts, self._plain_timeouts = timeouts_in(settings)

    def dispatch(self, cycle: HotCycle) -> None:
        """Takes a request that has arrived whole, at its turn on its connection.

        A request with a large body may wait for a later turn of the loop.
        """
        if cycle.num_body_bytes > FREE_BYTES:
            cycle.whole_at = cycle.whole_at or self.services.now()
            self._rows.enter(cycle)
        else:
            self._take(cycle)

    def _take(self, cycle: HotCycle) -> None:
        try:
            if cycle.path in REQUEST_PATHS:
                self._take_request(cycle)
            else:
                take_reservation(self.services, cycle)
        except Exception:  # noqa: BLE001 - logged below. The top of a request: a bug of ours fails this one, and no other.
            self._answer_bug(cycle)

    def is_internal(self, port: int) -> bool:
        """Whether this port of ours is one for engines, the operator and monitoring."""
        return port in self._internal_ports

    def paths_and_cycles(
        self, client: tuple[str, int] | None, *, is_internal: bool
    ) -> tuple[frozenset[bytes], Callable[..., HotCycle]]:
        """The hot paths of this port, and the factory of its cycles, with the arguments of ``HotCycle``.

        ``client``: the address of the other end of the connection; None: unknown.
        """
        if is_internal:
            return INTERNAL_PATHS, partial(HotCycle, is_for_engines=True)
        if self.access_log is None:
            return REQUEST_PATHS, HotCycle
        return REQUEST_PATHS, partial(LoggedCycle, self.access_log, self.addresses.of_connection(client))

    def refused_cycle(
        self, new_cycle: Callable[..., HotCycle], connection: ClientConnection, path: bytes, headers: Headers
    ) -> HotCycle:
        """The cycle of a request whose head is refused. The request is kept if its client gave an id.

        ``headers``: the headers that were read.
        """
        cycle = new_cycle(connection, path, NO_HEAD, lambda _: None, self.room)
        cycle.request_id = request_id_in(headers)
        if cycle.request_id and path in REQUEST_PATHS:
            cycle.head = remains_of(RequestHead(headers, dict(headers), 0, expects_continue=False, request_id=b""))
            cycle.on_refused = self._on_refused
        return cycle

    def admit(self, cycle: HotCycle) -> ApiError | None:
        """Checks the key of a client's hot request. Returns the error; None: the body may be read."""
        cycle.on_refused = self._on_refused
        if self.access.keys is None:
            return None
        admitted = self.access.admit(cycle.headers)
        if isinstance(admitted, str):
            cycle.client, cycle.keys = admitted, self.access.keys
            cycle.holder = admitted if cycle.keys.are_several else ""
            return None
        self.services.metrics.ended(Outcome.REJECTED)
        cycle.head = remains_of(cycle.head)  # The refusal may have to wait for its turn.
        return admitted

    def max_body_bytes(self, *, is_internal: bool) -> int:
        """How large a body on the hot paths of this port may be."""
        return self.settings.max_reservation_bytes if is_internal else self.settings.max_body_bytes

    def no_room(self) -> ApiError:
        """The error for a client whose bytes find no room. It is counted, and told in the log."""
        error = no_room(self.room.max_bytes)
        self.services.failures.tell(Failure(FailureKind.NO_ROOM, reason=error.message))
        return error

    def apply_settings(self, settings: Settings) -> None:
        """``settings`` hold from now on, for new requests. Only those of ``TAKEN`` may be others than before."""
        self.settings = settings
        self.services.apply_settings(settings)
        self.gate.apply_settings()
        self.addresses = _addresses_in(settings)
        self.models.set_aliases(self.services.model_terms.aliases)
        self.keep_alives.set_interval(settings.keep_alive_s)
        if self._sampling is not None:
            self._sampling = Sampling(settings.trace_sample_ratio, NOT_FORWARDED)
        self._stream_timeouts, self._plain_timeouts = timeouts_in(settings)

    def drain(self) -> None:
        """The router takes no new requests, and refuses those that wait. Running requests go on."""
        self.is_draining = True
        self.gate.drain()

    async def wait_until_idle(self, timeout_s: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Waits until no request or question runs. After ``timeout_s`` seconds, or once ``is_urgent``, running
        requests get an error, and the server cuts off the clients of questions."""
        deadline = self.services.now() + timeout_s
        while (self.services.running or self.num_asking) and self.services.now() < deadline and not is_urgent():
            await asyncio.sleep(0.05)
        for running in list(self.services.running):
            if running in self.services.running:  # One part that stops ends the others.
                running.stop(stopped())

    async def close(self) -> None:
        """Nothing is left: no request, no connection to an engine, no task."""
        await self.wait_until_idle(0)
        self.keep_alives.close()
        self.leavers.close()
        await self.services.close()
        if self.access_log is not None:
            self.access_log.close()

    def _take_request(self, cycle: HotCycle) -> None:
        try:
            request = self._parse(cycle)
            if cycle.gateway is not None:
                request = for_gateway(request, cycle.gateway, self._plain_timeouts.first_byte_s)
        except RefusedRequest as refused:
            self.services.metrics.ended(Outcome.REJECTED)
            cycle.answer_error(refused.error)
            return
        if self.access_log is not None and isinstance(cycle, LoggedCycle):
            cycle.asks_for(request.client, request.body)
        if self.access.keys is not None:
            admitted = self.access.enter(request.client, request.body.estimated_prompt_tokens, request.received_at)
            if isinstance(admitted, ApiError):
                self._limit(cycle, request, admitted)
                return
            cycle.slot = admitted
        if request.body.is_stream:
            self.keep_alives.watch(cycle)
        is_one = request.has_transfer or not request.terms.has_prefill or cycle.gateway is not None
        if is_one or not fan_out(self.services, self.clients.parts, self.gate.enter, cycle, request):
            self.gate.enter(cycle, request)

    def _limit(self, cycle: HotCycle, request: ClientRequest, error: ApiError) -> None:
        """Refuses a request whose key has asked for too much: no engine gets it."""
        self.services.metrics.ended(Outcome.LIMITED)
        cycle.teller = EndFacts(
            outcome=Outcome.LIMITED, failures=(), left_queue_at=request.received_at, trace_id=request.trace_id
        )
        keep_limited(self.services, request, error)
        cycle.answer_error(error, self.access.lines_for(request.client, request.received_at))

    def _start(self, cycle: HotCycle, request: ClientRequest) -> None:
        exchange = None
        try:
            exchange = Exchange(self.services, cycle, request)
            exchange.start()
        except Exception:  # noqa: BLE001 - logged below. The top of a request that waited: no ``dispatch`` is above it.
            self._answer_bug(cycle)
            if exchange is not None:
                exchange.break_off()

    def _answer_bug(self, cycle: HotCycle) -> None:
        logger.exception("request failed path=%s", cycle.path.decode("latin-1"))
        if not cycle.response_complete and (cycle.has_stream_begun or not cycle.has_started):
            cycle.answer_error(internal())

    def _parse(self, cycle: HotCycle) -> ClientRequest:
        """The request, from its head and its body. One long function: further calls would cost each request time.

        Raises:
            RefusedRequest: The router drains, no engine serves this API or model, or key, body or timeout are bad.
        """
        if self.is_draining:
            cycle.keep_alive = False
            self.services.failures.tell(Failure(FailureKind.DRAINING))
            raise RefusedRequest(draining())
        api = API_OF[cycle.path]
        if api.not_served is not None and (reason := self.services.dialect.gives_back_unseen):
            raise RefusedRequest(api.not_served(reason))
        received_at = self.services.now()
        headers, fields, client = cycle.head.headers, cycle.head.fields, cycle.client
        if cycle.keys is not self.access.keys:  # The keys have changed since the head was read.
            client = self._admitted_again(headers)
        sampled = _UNSAMPLED if self._sampling is None else self._sampling.of(headers, fields)
        trace = sampled.trace
        lines = b"".join([b"%b: %b\r\n" % header for header in headers if header[0] not in sampled.not_forwarded])
        lines += sampled.line
        lines += self.services.dialect.client_line(cycle.request_id)
        if self.access.keys is not None or not KEY_HEADERS.isdisjoint(fields):
            lines += self.access.line_for_engines(headers)
        try:
            body = api.parse(cycle.take_body())
        except BadBody as error:
            raise RefusedRequest(bad_request(str(error))) from error
        known = self.services.model_terms.unpaired if api.is_pooling else self.services.model_terms.known
        terms = known.get(bytes(body.model_said)) or self._terms_for(cycle, body)
        if terms.engines_name:
            body = body.for_model(terms.engines_name)
        timeouts = self._stream_timeouts if body.is_stream else self._plain_timeouts
        if TIMEOUT_HEADER in fields:
            timeouts = shortened(timeouts, fields[TIMEOUT_HEADER])
        return ClientRequest(
            path=cycle.path,
            headers=lines,
            request_id=cycle.request_id.decode("ascii"),
            trace_id=trace.ids.trace_id if trace else trace_id_in(headers, fields) if TRACE_HEADER in fields else "",
            trace=trace,
            api=api,
            body=body,
            timeouts=timeouts,
            terms=terms,
            has_transfer=terms.has_prefill and not body.needs_local_prefill,
            client=client,
            client_address=cycle.client_address,
            adapter=terms.adapter,
            received_at=received_at,
            read_s=(cycle.whole_at or received_at) - cycle.begun_at,
            turn_s=received_at - cycle.whole_at if cycle.whole_at else None,
        )

    def _terms_for(self, cycle: HotCycle, body: ClientBody) -> Terms:
        """The terms for a model that is new since the engines changed. Raises: RefusedRequest: No engine serves it."""
        terms = self.services.model_terms.find(body)
        if terms is not None:
            return terms
        if isinstance(cycle, LoggedCycle):
            cycle.asks_for(cycle.client, body.for_model(self.services.model_terms.name_for_engines(body.model)))
        raise RefusedRequest(self.services.model_terms.not_found(body.model))

    def _admitted_again(self, headers: list[tuple[bytes, bytes]]) -> str:
        admitted = self.access.admit(headers)
        if isinstance(admitted, str):
            return admitted
        raise RefusedRequest(admitted)


def _addresses_in(settings: Settings) -> ClientAddresses:
    return ClientAddresses(map(parse_network, settings.trusted_proxies), settings.forwarded_header)


def _watches_of(*owners: Certificate | EngineTrust | EngineFile | None) -> list[FileWatch]:
    return [owner.watch for owner in owners if owner is not None and owner.watch is not None]


def expiries_of(owners: Iterable[Certificate | EngineTrust | None]) -> list[float]:
    """The end of each certificate that this router shows, in Unix seconds."""
    return [owner.expires_at for owner in owners if owner is not None and owner.expires_at is not None]


def _access_log_of(settings: Settings, services: Services) -> AccessLog | None:
    if settings.access_log is None:
        return None
    return AccessLog(settings.access_log, services.metrics.access_log_lost.inc, asyncio.get_running_loop())
