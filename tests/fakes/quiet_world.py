"""One request among engines that are sent nothing: the real exchange, legs and engines, and a played world around them.

What engines, decode and the client do is called here as their connections would call it. The clock is the real one:
timeouts of 0 s have passed as soon as the event loop turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import msgspec

from fakes.reservations import plain_reservation
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import LocalPrefill
from pdcluster_protocol.secret import make_secret
from pdcluster_router.core.apis.client_apis import OPENAI
from pdcluster_router.core.apis.rewrite import Parts, parse_body
from pdcluster_router.core.clients.room import Room
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.engines.outage import Sign
from pdcluster_router.core.engines.placement import RequestFacts
from pdcluster_router.core.requests.dialect import LayerwiseCall
from pdcluster_router.core.requests.pairing import Retries, Timeouts
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.roster import Terms
from pdcluster_router.http.connection import Call, ResponseHead, ResponseLost, ResponseSink
from pdcluster_router.http.connections import IdleConnections, PoolLimits
from pdcluster_router.http.cycle import NO_HEAD, HotCycle
from pdcluster_router.requests.exchange import Exchange
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.services import Services
from pdcluster_router.settings.forms import EngineDialect
from pdcluster_router.settings.router_settings import build_settings

PATIENT: Final = Timeouts(None, 600.0)


class Silent:
    """A client's connection, or decode's to the metaserver, of which nothing is read."""

    is_full = False

    def write(self, data: bytes) -> None: ...

    def answered(self) -> None: ...

    def close(self, *, with_reset: bool = False) -> None: ...


class QuietEngine(Engine):
    """An engine that is sent nothing. It keeps its calls."""

    def __init__(self, role: Role, number: int, now: Callable[[], float]) -> None:
        nothing: Callable[[object], None] = lambda _: None  # noqa: E731
        super().__init__(
            f"{role.value}-{number}",
            Member(f"http://{role.value}-{number}:1", role),
            PoolLimits(1, 1.0, 1.0),
            IdleConnections(),
            on_idle=lambda: None,
            on_breaker=nothing,
            now=now,
        )
        self.calls: list[Call] = []

    def post(self, path: bytes, headers: bytes, body: Parts, sink: ResponseSink, *, fresh: bool = False) -> Call:
        self.calls.append(Call(sink))
        return self.calls[-1]


class World:
    """One request, two engines of each role, and all that may happen."""

    def __init__(
        self,
        timeouts: Timeouts = PATIENT,
        retries: Retries | None = None,
        dialect: EngineDialect = EngineDialect.PDCLUSTER,
    ) -> None:
        urls = {"prefill_urls": ["http://p:1"], "decode_urls": ["http://d:1"]}
        known = build_settings(**urls, internal_port=9, engine_dialect=dialect)
        self.posted = plain_reservation if dialect is EngineDialect.PDCLUSTER else layerwise_call_of
        self.services = Services(known, make_secret("s" * 32))
        self.engines = {role: [QuietEngine(role, number, self.services.now) for number in range(2)] for role in Role}
        self.ended: set[Call] = set()
        self.exchange = Exchange(self.services, self._cycle(), self._request(timeouts, retries or Retries()))
        self.metaserver_cycles: list[HotCycle] = []
        self.exchange.start()

    def _cycle(self) -> HotCycle:
        return HotCycle(Silent(), b"/v1/completions", NO_HEAD, lambda _: None, Room(1 << 20))

    def _request(self, timeouts: Timeouts, retries: Retries) -> ClientRequest:
        self.services.admissions.shared[Role.PREFILL].set_engines(2)
        body = parse_body(b'{"model": "m", "prompt": "the words of a prompt", "stream": true}')
        self.services.admissions.shared[Role.PREFILL].take_again(
            self.services.admissions.shared[Role.PREFILL].share_of(body.estimated_prompt_tokens)
        )
        return ClientRequest(
            path=b"/v1/completions",
            headers=b"",
            body=body,
            client="",
            request_id="r",
            api=OPENAI,
            timeouts=timeouts,
            terms=Terms(
                self._place(Role.DECODE),
                lambda facts, failed, _: self._place(Role.PREFILL)(facts, failed),
                self.services.dialect.retries(retries),
                self.services.admissions.shared,
            ),
            has_transfer=True,
            received_at=self.services.now(),
        )

    def _place(self, role: Role) -> Callable[[RequestFacts, Collection[Engine]], Engine | None]:
        return lambda _, tried: next((one for one in self.engines[role] if one not in tried), None)

    @property
    def is_running(self) -> bool:
        return bool(self.services.running)

    def call_of(self, role: Role) -> Call | None:
        """The call that runs at an engine of this role; None: none does."""
        calls = [call for engine in self.engines[role] for call in engine.calls]
        return next((call for call in calls if not call.is_closed and call not in self.ended), None)

    def answers(self, role: Role, status: int, content_type: bytes, *parts: bytes, ends: bool = True) -> None:
        """The engine with the call answers with these parts, as far as the call is not closed meanwhile."""
        call = self.call_of(role)
        if call is None:
            return
        call.sink.on_head(ResponseHead(status, [], None, content_type))
        for part in parts:
            if not call.is_closed:
                call.sink.on_body(part)
        if ends and not call.is_closed:
            self.ended.add(call)
            call.sink.on_end()

    def loses(self, role: Role, lost: ResponseLost) -> None:
        call = self.call_of(role)
        if call is not None:
            self.ended.add(call)
            call.sink.on_lost(lost)

    def reserves(self, **changes: object) -> None:
        """Decode posts its reservation."""
        for transfer_id, running in list(self.services.transfers.items()):
            cycle = self._cycle()
            self.metaserver_cycles.append(cycle)
            if running.reserve(self.posted(transfer_id, **changes), cycle) is not None:
                self.metaserver_cycles.remove(cycle)

    def prefills_locally(self) -> None:
        for transfer_id, running in list(self.services.transfers.items()):
            said = LocalPrefill(
                transfer_id=transfer_id, attempt=Attempt(1), deadline_ms=9, num_prompt_tokens=42, num_local_tokens=26
            )
            running.prefills_locally(said)

    def hangs_up_on_the_metaserver(self) -> None:
        for cycle in self.metaserver_cycles:
            if cycle.owner is not None and not cycle.response_complete:
                cycle.owner.client_gone()
        self.metaserver_cycles.clear()

    def seem_gone(self) -> None:
        """Probes say that all engines are."""
        for engine in self.all_engines():
            engine.found(Sign.DEAD, most_s=1e9)
            engine.found(Sign.DEAD, most_s=1e9)

    def all_engines(self) -> list[QuietEngine]:
        return [engine for engines in self.engines.values() for engine in engines]

    def load(self) -> dict[str, tuple[int, int]]:
        """Of each engine that has any: tokens and requests."""
        found = {one.name: (one.load.outstanding_tokens, one.num_running) for one in self.all_engines()}
        return {name: load for name, load in found.items() if load != (0, 0)}

    def require_nothing_left(self) -> None:
        while self.services.dialect.prefill_goes_on and self.call_of(Role.PREFILL) is not None:
            self.loses(Role.PREFILL, ResponseLost("it hung up"))  # Such a call may outlive its request, with its load.
        assert self.load() == {}
        assert not self.services.transfers
        assert self.services.admissions.shared[Role.PREFILL].backlog_tokens == 0
        assert all(call.is_closed or call in self.ended for one in self.all_engines() for call in one.calls)


def layerwise_call_of(transfer_id: TransferId, **changes: object) -> LayerwiseCall:
    known = LayerwiseCall(transfer_id=transfer_id, posted=b"{}", num_prompt_tokens=42, remote_cached_tokens=16)
    return msgspec.structs.replace(known, **changes)
