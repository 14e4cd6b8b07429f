"""One vLLM engine as the router sees it: where it is, what it may get, what it has to do, whether it is well.

Knows no request and no policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from pdcluster_protocol.errors import Unavailable
from pdcluster_router.core.apis.rewrite import Parts
from pdcluster_router.core.engines.breaker import CLOSED, Breaker, Era
from pdcluster_router.core.engines.listing import Listing
from pdcluster_router.core.engines.load import Load
from pdcluster_router.core.engines.membership import EngineState, Member
from pdcluster_router.core.engines.outage import Outage, Sign, sign_of_failure, sign_of_status
from pdcluster_router.core.telemetry.histogram import COARSE, Histogram
from pdcluster_router.core.telemetry.scrub import scrub
from pdcluster_router.engines.trust import EngineTrust
from pdcluster_router.http.answers import Collector, Fetched, LostError
from pdcluster_router.http.connection import Call, Request, ResponseSink
from pdcluster_router.http.connections import ConnectionPool, IdleConnections, PoolLimits
from pdcluster_router.processes.shared_loads import SharedLoad

MAX_FETCHED_BYTES = 16 << 20
_SERVING: Final = EngineState.SERVING
"""A name of its own: each request reads it."""
_POST: Final = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\n%b\r\n"


class NoWholeAnswer(Unavailable):
    """An engine gave no whole answer. ``is_unsent``: it never saw the question. ``is_late``: its time ran out.
    ``is_too_large``: the answer has more than ``MAX_FETCHED_BYTES``."""

    def __init__(
        self, reason: str, *, is_unsent: bool = False, is_late: bool = False, is_too_large: bool = False
    ) -> None:
        super().__init__(reason)
        self.is_unsent = is_unsent
        self.is_late = is_late
        self.is_too_large = is_too_large


class Engine:
    """One engine. One event loop owns it; ``close`` closes its connections."""

    def __init__(
        self,
        name: str,
        member: Member,
        limits: PoolLimits,
        idle_connections: IdleConnections,
        *,
        on_idle: Callable[[], None],
        on_breaker: Callable[[Engine], None],
        now: Callable[[], float],
        trust: EngineTrust | None = None,
        shared: SharedLoad | None = None,
    ) -> None:
        """``idle_connections``: those of all engines. ``on_idle``: called when the engine's last request has ended
        while it gets no new ones. ``on_breaker``: called when the engine is ejected, tried, or back. ``now``: monotonic
        seconds. ``trust``: for an engine with TLS. ``shared``: its load in the router's other processes.
        """
        parts = urlsplit(member.url)
        self.name = name
        """Its name in logs and errors, which never show its address."""
        self.role = member.role
        self.revision = member.revision
        self.url = member.url
        self.pod = member.pod
        self.state = EngineState.SERVING
        """The work that it may get. Only its roster changes it."""
        self.is_healthy = False
        self.num_running = 0
        """Requests that are there now."""
        self.num_taken_up = 0
        """Grows whenever decode takes up a request: ``core/engines/uptake.py``."""
        self.load = Load(others=shared)
        self._shared = shared
        self.breaker = Breaker()
        self.outage = Outage()
        self.answered = Histogram(COARSE)
        """From a call to its answer, as ``EngineSample`` has it. Requests add to it."""
        self.listing: Listing | None = None
        """The models that it serves; None: it has not told this router."""
        self.lists_too_much = False
        """Whether its list of models was longer than the router reads, when it was asked last."""
        self._on_idle = on_idle
        self._on_breaker = on_breaker
        self._now = now
        self._host = parts.netloc.encode()
        host, is_tls = parts.hostname or "", parts.scheme == "https"
        assert trust is not None or not is_tls
        door = trust.door(name, host) if trust is not None and is_tls else None
        self.pool = ConnectionPool(host, parts.port or (443 if is_tls else 80), limits, idle_connections, door)
        self.change(member.state)

    @property
    def is_busy(self) -> bool:
        return self.num_running > 0

    @property
    def is_free(self) -> bool:
        """Whether it has no request, of this process or the router's others."""
        return not self.num_running and (self._shared is None or not self._shared.others())

    @property
    def is_well(self) -> bool:
        """Whether it serves, and neither its probes nor its last request speak against it."""
        is_whole = self.breaker.circuit is CLOSED and not self.breaker.has_just_failed
        return self.is_healthy and self.state is _SERVING and is_whole

    def found(self, sign: Sign, *, most_s: float) -> bool:
        """A probe has shown ``sign``. Returns whether ``is_healthy`` has changed. ``most_s``: the longest time between
        two probes, in seconds."""
        now = self._now()
        self.outage.saw(sign, now=now, most_s=most_s)
        was_healthy, self.is_healthy = self.is_healthy, sign is Sign.WELL
        if self.is_healthy and not was_healthy:
            self.load.start_slowly(now=now)
        return self.is_healthy != was_healthy

    def change(self, state: EngineState) -> None:
        """The engine gets the work that ``state`` allows. If that is no new work, its idle connections are closed."""
        if state is EngineState.SERVING and self.state is not state:
            self.load.start_slowly(now=self._now())
        self.state = state
        self.pool.keep(state is EngineState.SERVING)

    def take(self, num_tokens: int) -> Era:
        """A request of about ``num_tokens`` is placed here. Call ``give_back`` when it has ended, with its tokens as
        ``recount`` has left them.

        Returns the era, for ``began``, ``failed`` and the breaker.
        """
        self.load.outstanding_tokens += num_tokens
        if self._shared is not None:
            self._shared.tell(self.load.outstanding_tokens)
        self.load.placed_at = now = self._now()
        self.num_running += 1
        breaker = self.breaker
        if breaker.circuit is not CLOSED and breaker.take(now=now):
            self._on_breaker(self)
        return breaker.era

    def recount(self, num_tokens: int) -> None:
        """A request that is placed here has ``num_tokens`` more than was thought; below 0: fewer."""
        self.load.outstanding_tokens += num_tokens
        if self._shared is not None:
            self._shared.tell(self.load.outstanding_tokens)

    def give_back(self, num_tokens: int) -> None:
        self.load.outstanding_tokens -= num_tokens
        if self._shared is not None:
            self._shared.tell(self.load.outstanding_tokens)
        self.num_running -= 1
        if not self.num_running and self.state is not _SERVING:
            self._on_idle()

    def leave(self) -> None:
        """The engine is removed from its roster: it has no request any more."""
        if self._shared is not None:
            self._shared.leave()

    def began(self, era: Era) -> None:
        """The engine has begun to answer a request of ``era``, or has done its part of that request."""
        breaker = self.breaker
        if breaker.circuit is not CLOSED and breaker.began(era):
            self.load.start_slowly(now=self._now())
            self._on_breaker(self)

    def weigh_down(self, num_tokens: int) -> None:
        """A request of ``num_tokens`` has failed here: for some seconds it counts as if it ran on."""
        self.load.add_failed(num_tokens, now=self._now())

    def failed(self, era: Era) -> None:
        """A request of ``era`` has failed, and this engine is to blame."""
        if self.breaker.failed(era, now=self._now()):
            self._on_breaker(self)

    def post(self, path: bytes, headers: bytes, body: Parts, sink: ResponseSink, *, fresh: bool = False) -> Call:
        """Start one POST. ``headers``: whole lines, without Host and Content-Length."""
        head = _POST % (path, self._host, len(body[0]) + len(body[1]), headers)
        return self.pool.send((head, *body), sink, fresh=fresh)

    async def probe(self, *, timeout_s: float) -> Sign:
        """Asks the engine's ``/health``, for ``timeout_s`` seconds at most. The call does not count for the limit of
        connections."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._fetch_once(self._get("/health"), Collector(MAX_FETCHED_BYTES), is_probe=True)
        except TimeoutError:
            return Sign.SILENT
        except LostError as error:
            lost = error.lost
            return sign_of_failure(lost.error_number, is_ours=lost.is_ours or lost.is_untrusted)
        return sign_of_status(answer.head.status)

    async def fetch(self, path: str, *, timeout_s: float, headers: bytes = b"", body: bytes | None = None) -> Fetched:
        """The whole answer to one GET, or one POST of ``body``. ``headers``: whole lines.

        Raises:
            NoWholeAnswer: No complete answer within ``timeout_s`` seconds, or more than ``MAX_FETCHED_BYTES`` of it.
        """
        request = self._get(path, headers)
        if body is not None:
            request = (_POST % (path.encode(), self._host, len(body), headers), body)
        collector = Collector(MAX_FETCHED_BYTES)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._fetch_once(request, collector)
        except TimeoutError as error:
            reason = f"{self.name} sent no answer within {timeout_s:.3g} s"
            raise NoWholeAnswer(reason, is_unsent=not collector.is_sent, is_late=True) from error
        except LostError as error:
            reason, is_unsent = scrub(f"{self.name}: {error}"), error.lost.is_unsent
            raise NoWholeAnswer(reason, is_unsent=is_unsent, is_too_large=error.is_too_large) from error

    async def _fetch_once(
        self, request: Request, collector: Collector, *, is_probe: bool = False, fresh: bool = False
    ) -> Fetched:
        """Sends the request. If an idle connection was found closed, sends it again on a new one."""
        call = self.pool.send(request, collector, fresh=fresh, is_exempt=is_probe)
        try:
            return await collector.done
        except LostError as error:
            if fresh or not error.lost.is_stale:
                raise
        finally:
            collector.is_sent = call.connection is not None
            call.close()
        again = Collector(MAX_FETCHED_BYTES)
        try:
            return await self._fetch_once(request, again, is_probe=is_probe, fresh=True)
        finally:
            collector.is_sent = again.is_sent

    def _get(self, path: str, headers: bytes = b"") -> Request:
        return (b"GET %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (path.encode(), self._host, headers),)

    async def close(self) -> None:
        await self.pool.close()
