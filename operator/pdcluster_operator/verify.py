"""Sends the request that proves a target: ``POST /pdcluster/verify`` of one of the pool's routers.

The request may take a minute, so it runs beside the work queue: a reconcile asks for it and goes on, and the result
causes another look. Results are kept for one term. Status keeps them too. So a new leader verifies only targets that
are not proven, and status goes on telling of an earlier failure until the new leader has a result.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from pdcluster_operator.caches import Key
from pdcluster_operator.clock import steady_s
from pdcluster_operator.core.seen.observed import VerificationResult
from pdcluster_operator.core.verifications import TargetVerifications, VerificationEnd
from pdcluster_operator.errors import KubeError
from pdcluster_operator.kinds import Ref
from pdcluster_operator.pool_secrets import PoolSecrets
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.pem_files import client_context
from pdcluster_protocol.secret import Secret, make_secret
from pdcluster_protocol.verify import VERIFY_PATH, VerifyOrder

logger = logging.getLogger(__name__)

MAX_RUNNING: Final = 32
"""The most requests at a time, for all pools together. Each one waits for engines and costs us only a connection."""
MAX_PODS: Final = 100
"""The most names of pods of one role in an order. The router may choose any of these pods."""
MAX_ANSWER_BYTES: Final = 65536
"""The most bytes of an answer. A router's is a few hundred bytes."""
_MARGIN_S: Final = 5.0
"""Seconds for the network, beyond the time that the router may take."""
_PASS_S: Final = 120
"""Seconds for which an order's pass is valid: room for the way to the router and for clocks that differ."""
_SERVER_ERROR: Final = 500
_NO_VERDICT: Final = frozenset({408, 429})


@dataclass(frozen=True, slots=True)
class RouterTrust:
    """How to know a router: its certificate has the name ``name``, and is signed by an authority that the Secret holds
    under ``key``."""

    secret: Ref
    key: str
    name: str

    def context(self, authorities: str) -> ssl.SSLContext:
        """TLS settings that trust ``authorities``: certificates in PEM. Text between them may be in any language.

        Raises:
            ConfigError: ``authorities`` are no certificates.
        """
        context = client_context()
        try:
            context.load_verify_locations(cadata=authorities.encode("ascii", "ignore").decode())
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"{self.secret}, key {self.key}: {error}: give certificates in PEM") from error
        return context


@dataclass(frozen=True, slots=True)
class ToVerify:
    """A target to verify. ``url``: the Service of the routers' internal port. ``secret`` and ``secret_key``: the Secret
    that holds the pool's secret, and the key in it. ``trust``: None if the routers have no TLS."""

    target: str
    revision: str
    prefill_pods: tuple[str, ...]
    decode_pods: tuple[str, ...]
    url: str
    secret: Ref
    secret_key: str
    trust: RouterTrust | None = None


class TargetVerifier:
    """Sends all verifications of one term. Event loop only; ``run`` owns the tasks."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        secrets: PoolSecrets,
        *,
        timeout_s: float,
        on_result: Callable[[Key], None],
    ) -> None:
        """``session`` must not send our token: routers must not see it. It must not decompress answers, either."""
        self._session = session
        self._secrets = secrets
        self._timeout_s = timeout_s
        self._on_result = on_result
        self._verifications: dict[Key, TargetVerifications] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._room = asyncio.Semaphore(MAX_RUNNING)

    async def run(self) -> None:
        """Run until cancelled; afterwards no request is under way."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await asyncio.Event().wait()

    @property
    def num_running(self) -> int:
        """Number of requests that are under way or wait for room."""
        return sum(known.due_at is None for known in self._verifications.values())

    def results(self, key: Key) -> Mapping[str, VerificationResult]:
        """The PDCluster's last result, by name of its target; empty: there is no result yet."""
        known = self._verifications.get(key)
        return {known.target: known.result} if known and known.result else {}

    def ask(self, key: Key, asked: ToVerify) -> float | None:
        """Send a request if it is time. Returns seconds until the next call; None: a request is under way."""
        now, known = steady_s(), self._verifications.get(key)
        if known is None or known.target != asked.target:
            known = TargetVerifications(asked.target, now)
        if known.may_start(now) and self._tasks is not None:
            known = known.started()
            self._tasks.create_task(self._prove(key, asked, known), name=f"verify {key}")
        self._verifications[key] = known
        return None if known.due_at is None else max(0.0, known.due_at - now)

    def forget(self, key: Key) -> None:
        """Drop the results of a PDCluster that is gone or whose engines go. A request under way will not count."""
        self._verifications.pop(key, None)

    async def _prove(self, key: Key, asked: ToVerify, known: TargetVerifications) -> None:
        async with self._room:
            verdict, error = await self._send(asked)
        if self._verifications.get(key) is not known:
            return  # The PDCluster is gone or has another target: the result is of no use.
        logger.info("verified cluster=%s target=%s verdict=%s reason=%s", key, asked.target, verdict.name, error or "-")
        self._verifications[key] = known.ended(verdict, error, steady_s(), random.random())  # noqa: S311 - spreads load
        self._on_result(key)

    async def _send(self, asked: ToVerify) -> tuple[VerificationEnd, str]:
        try:
            secret = await self._secret(asked)
            pods = asked.prefill_pods[:MAX_PODS], asked.decode_pods[:MAX_PODS]
            body = msgspec.json.encode(VerifyOrder(asked.revision, *pods, self._timeout_s))
            headers = {
                "Authorization": f"Bearer {secret.mint_pass(body, int(time.time()) + _PASS_S)}",
                "Content-Type": "application/json",
            }
            async with asyncio.timeout(self._timeout_s + _MARGIN_S):
                status, answer = await self._post(asked, body, headers)
            return _verdict_of(status, answer)
        except ConfigError as error:
            return VerificationEnd.FAILED, str(error)
        except KubeError as error:
            return VerificationEnd.UNANSWERED, str(error)
        except TimeoutError:
            return VerificationEnd.UNANSWERED, f"{asked.url} did not answer in {self._timeout_s + _MARGIN_S:g} s"
        except aiohttp.ClientSSLError as error:
            return VerificationEnd.UNANSWERED, _not_trusted(asked, error)
        except (aiohttp.ClientError, OSError) as error:
            return VerificationEnd.UNANSWERED, f"{asked.url} could not be asked: {error}"
        except Exception as error:
            # The top of a task: a bug in one pool's verification must not end the term, and with it all pools' work.
            logger.exception("verification broke target=%s", asked.target)
            return VerificationEnd.UNANSWERED, f"{asked.url} could not be asked: {type(error).__name__}"

    async def _secret(self, asked: ToVerify) -> Secret:
        """The pool's secret.

        Raises:
            ConfigError: The value in the Secret cannot be a pool's secret.
            KubeError: The Secret was not read.
        """
        text = await self._secrets.read(asked.secret, asked.secret_key)
        try:
            return make_secret(text)
        except ConfigError as error:
            raise ConfigError(f"{asked.secret}, key {asked.secret_key}: {error}") from error

    async def _post(self, asked: ToVerify, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body of the answer. The authorities are read for each order, because they may be renewed."""
        url, trust = asked.url + VERIFY_PATH, asked.trust
        context = trust.context(await self._secrets.read(trust.secret, trust.key)) if trust else True
        name = trust.name if trust else None
        # No redirects: an order is for this pool's routers, and another place may speak plain HTTP.
        async with self._session.post(
            url, data=body, headers=headers, ssl=context, server_hostname=name, allow_redirects=False
        ) as response:
            return response.status, await _read_bounded(response, url)


async def _read_bounded(response: aiohttp.ClientResponse, url: str) -> bytes:
    """The body. A pool's owner says who answers there, so the answer may be without end, or small and compressed.

    Raises:
        ConfigError: The body is longer than ``MAX_ANSWER_BYTES``, and the status is no server's error.
    """
    body = bytearray()
    while part := await response.content.read(MAX_ANSWER_BYTES + 1 - len(body)):
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            response.close()
            if response.status >= _SERVER_ERROR:
                break  # A page of a proxy: no router has answered yet.
            raise ConfigError(f"{url} answered more than {MAX_ANSWER_BYTES} bytes: no router of ours does")
    return bytes(body)


def _not_trusted(asked: ToVerify, error: aiohttp.ClientSSLError) -> str:
    told = f"{asked.url} has no TLS that is trusted: {error.os_error}"
    if asked.trust is None:
        return told
    name, secret, key = asked.trust.name, asked.trust.secret, asked.trust.key
    return f"{told}: its certificate must have the name {name}, and be signed by {key} of {secret}"


def _verdict_of(status: int, body: bytes) -> tuple[VerificationEnd, str]:
    message = _message_of(body)
    if status == 200:
        return VerificationEnd.PASSED, ""
    if status >= _SERVER_ERROR or status in _NO_VERDICT:
        return VerificationEnd.UNANSWERED, f"the router answered {status}: {message}"
    return VerificationEnd.FAILED, message


def _message_of(body: bytes) -> str:
    """The message in OpenAI's error format; of an answer in another format, its beginning."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:300].decode("utf-8", "replace")
