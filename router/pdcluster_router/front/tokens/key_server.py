"""Reads an identity provider's key set from its URL, again and again.

    ASKING --a key set--> RESTING interval_s ----------------+--> ASKING
       +--none in time, or no key set--> RESTING, ever longer, from 1 s
                      want(): a token names an unknown key: RESTING ends early, but never within EARLY_S of a question

The keys of the last good answer stay while there is no other. One line in the log says that a question failed, until
there is another reason. No proxy is used, and no redirect is followed: the URL is the place that is trusted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from pdcluster_kube.backoff import Backoff
from pdcluster_protocol.errors import ConfigError, Unavailable
from pdcluster_router.core.clients.tokens.jwks import MAX_DOCUMENT_BYTES
from pdcluster_router.core.telemetry.scrub import scrub
from pdcluster_router.engines.trust import engine_context
from pdcluster_router.http.answers import Collector, Fetched, LostError
from pdcluster_router.http.connections import ConnectionPool, IdleConnections, PoolLimits
from pdcluster_router.http.engine_tls import EngineDoor, TlsCures
from pdcluster_router.http.handshakes import HandshakeRow

logger = logging.getLogger(__name__)

ASK_S: Final = 10.0
"""Seconds for one question. No request waits for it."""
EARLY_S: Final = 10.0
"""Seconds between two questions that tokens bring forward: clients can make up names of keys."""
_BACKOFF: Final = Backoff(first_s=1.0, most_s=60.0)
_CURES: Final = TlsCures(
    no_tls="see the URL of --jwt-key-set",
    wrong_name="name a host that it has in --jwt-key-set",
    unknown_issuer="add its authority to those of this system, or name a file with it in SSL_CERT_FILE",
)


class KeyServer:
    """The server of one key set. Event loop only; one task owns ``run``."""

    def __init__(
        self,
        url: str,
        interval_s: float,
        take: Callable[[bytes], None],
        age_s: Callable[[], float],
        handshakes: HandshakeRow,
    ) -> None:
        """``take``: gets each document; raises ConfigError if it is no key set. ``age_s``: of the last good one."""
        parts = urlsplit(url)
        path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        self._head = f"GET {path} HTTP/1.1\r\nhost: {parts.netloc}\r\naccept: application/json\r\n\r\n".encode()
        self._interval_s = interval_s
        self._take = take
        self._age_s = age_s
        host, is_tls = parts.hostname or "", parts.scheme == "https"
        door = _door(host, handshakes) if is_tls else None
        limits = PoolLimits(max_connections=1, connect_timeout_s=ASK_S, idle_s=0.0)
        self._pool = ConnectionPool(host, parts.port or (443 if is_tls else 80), limits, IdleConnections(), door)
        self._pool.keep(False)
        self._loop = asyncio.get_running_loop()
        self._wanted = asyncio.Event()
        self._asked_at = self._loop.time()
        self._problem = ""
        """Why the last question failed; empty: it did not."""
        self._num_failures = 0
        self.has_asked = asyncio.Event()
        """Set after the first question, whatever came of it."""

    def want(self) -> None:
        """The next question comes at once, or ``EARLY_S`` after the last one."""
        self._wanted.set()

    async def run(self) -> None:
        """Asks until cancelled; then no connection is left."""
        try:
            while True:
                self._asked_at = self._loop.time()
                self._wanted.clear()
                await self._ask_and_tell()
                self.has_asked.set()
                await self._rest()
        finally:
            await self._pool.close()

    async def _rest(self) -> None:
        failing_s = _BACKOFF.pause_s(self._num_failures, random.random())  # noqa: S311 - no secret
        try:
            async with asyncio.timeout(failing_s if self._num_failures else self._interval_s):
                await self._wanted.wait()
                await asyncio.sleep(self._asked_at + EARLY_S - self._loop.time())
        except TimeoutError:
            pass

    async def _ask_and_tell(self) -> None:
        told = self._problem
        try:
            self._take(await self._ask())
        except (ConfigError, Unavailable) as error:
            self._num_failures += 1
            self._problem = str(error)
            if self._problem != told:
                logger.warning("token keys not read age_s=%.0f reason=%s", self._age_s(), self._problem)
            return
        self._num_failures, self._problem = 0, ""
        if told:
            logger.warning("token keys are read again")

    async def _ask(self) -> bytes:
        """The body of one answer. Raises: Unavailable: There is no whole one, or it is no success."""
        try:
            async with asyncio.timeout(ASK_S):
                answer = await self._fetch()
        except TimeoutError as error:
            raise Unavailable(f"no whole answer within {ASK_S:g} s: see --jwt-key-set and the way there") from error
        except LostError as error:
            raise Unavailable(scrub(f"{error}: see --jwt-key-set and the way there")) from error
        if answer.head.status != 200:
            raise Unavailable(f"status {answer.head.status}: name the URL of the key set itself with --jwt-key-set")
        return answer.body

    async def _fetch(self) -> Fetched:
        collector = Collector(MAX_DOCUMENT_BYTES)
        call = self._pool.send((self._head,), collector, fresh=True)
        try:
            return await collector.done
        finally:
            call.close()


def _door(host: str, handshakes: HandshakeRow) -> EngineDoor:
    context: list[ssl.SSLContext] = []

    def current() -> ssl.SSLContext:
        """Made once: to read this system's authorities takes a while."""
        if not context:
            context.append(engine_context(None, None)[0])
        return context[0]

    words = "this system's authorities"
    return EngineDoor(current, host, words, handshakes, lambda: None, lambda _: None, _CURES)
