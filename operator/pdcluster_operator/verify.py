"""Sends the request that proves a target: ``POST /pdcluster/verify`` of one of the pool's routers.

Beside the work queue, for it may take a minute: a reconcile asks for it and goes on, and is told of the result by
another look at its object. Results live as long as the term; status keeps them, so a new leader asks only for what was
not proven yet, and until then says what failed before it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from pdcluster_operator.caches import Key
from pdcluster_operator.clock import steady_s
from pdcluster_operator.core.observed import VerificationResult
from pdcluster_operator.core.trials import TargetTrials, TrialVerdict
from pdcluster_operator.errors import KubeError
from pdcluster_operator.kinds import Ref
from pdcluster_operator.pool_secrets import PoolSecrets
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.secret import make_secret
from pdcluster_protocol.verify import VERIFY_PATH, VerifyOrder

logger = logging.getLogger(__name__)

MAX_RUNNING: Final = 32
"""Requests of all pools at a time: each waits for engines, and costs us nothing but a connection."""
MAX_PODS: Final = 100
"""Names of pods in one order; any of them will do."""
_MARGIN_S: Final = 5.0
"""For the way there and back, beyond what the router may take."""
_PASS_S: Final = 120
"""For how long the order may be carried out: its own time, and clocks that differ."""
_NO_VERDICT: Final = frozenset({408, 429})


@dataclass(frozen=True, slots=True)
class ToVerify:
    """The target of a verification. ``url``: of the Service of the routers' internal port. ``secret``,
    ``secret_key``: where the pool's own is."""

    target: str
    revision: str
    prefill_pods: tuple[str, ...]
    decode_pods: tuple[str, ...]
    url: str
    secret: Ref
    secret_key: str


class TargetVerifier:
    """All requests of one term. Event loop only; ``run`` owns the tasks."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        secrets: PoolSecrets,
        *,
        timeout_s: float,
        on_result: Callable[[Key], None],
    ) -> None:
        """``session``: without our token, which routers have no business with."""
        self._session = session
        self._secrets = secrets
        self._timeout_s = timeout_s
        self._on_result = on_result
        self._trials: dict[Key, TargetTrials] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._room = asyncio.Semaphore(MAX_RUNNING)

    async def run(self) -> None:
        """Until it is cancelled; then no request is under way."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await asyncio.Event().wait()

    @property
    def num_running(self) -> int:
        """Requests under way, or waiting for room."""
        return sum(trial.due_at is None for trial in self._trials.values())

    def results(self, key: Key) -> Mapping[str, VerificationResult]:
        """By target, as the planner wants it."""
        trial = self._trials.get(key)
        return {trial.target: trial.result} if trial and trial.result else {}

    def ask(self, key: Key, asked: ToVerify) -> float | None:
        """Prove it if it is time. Returns the seconds after which to ask again; None: the result will tell."""
        now, trial = steady_s(), self._trials.get(key)
        if trial is None or trial.target != asked.target:
            trial = TargetTrials(asked.target, now)
        if trial.may_start(now) and self._tasks is not None:
            trial = trial.started()
            self._tasks.create_task(self._prove(key, asked, trial), name=f"verify {key}")
        self._trials[key] = trial
        return None if trial.due_at is None else max(0.0, trial.due_at - now)

    def forget(self, key: Key) -> None:
        """This PDCluster is gone, or stopped. A request under way proves nothing for it any more."""
        self._trials.pop(key, None)

    async def _prove(self, key: Key, asked: ToVerify, trial: TargetTrials) -> None:
        async with self._room:
            verdict, error = await self._send(asked)
        if self._trials.get(key) is not trial:
            return  # The PDCluster is gone or has another target: the result is of no use.
        logger.info("verified cluster=%s target=%s verdict=%s reason=%s", key, asked.target, verdict.name, error or "-")
        self._trials[key] = trial.ended(verdict, error, steady_s(), random.random())  # noqa: S311 - spreads load
        self._on_result(key)

    async def _send(self, asked: ToVerify) -> tuple[TrialVerdict, str]:
        try:
            secret = make_secret(await self._secrets.read(asked.secret, asked.secret_key))
            pods = asked.prefill_pods[:MAX_PODS], asked.decode_pods[:MAX_PODS]
            body = msgspec.json.encode(VerifyOrder(asked.revision, *pods, self._timeout_s))
            headers = {
                "Authorization": f"Bearer {secret.mint_pass(body, int(time.time()) + _PASS_S)}",
                "Content-Type": "application/json",
            }
            async with asyncio.timeout(self._timeout_s + _MARGIN_S):
                async with self._session.post(asked.url + VERIFY_PATH, data=body, headers=headers) as response:
                    return _verdict_of(response.status, await response.read())
        except ConfigError as error:
            return TrialVerdict.FAILED, f"{asked.secret}, key {asked.secret_key}: {error}"
        except KubeError as error:
            return TrialVerdict.NOBODY_ANSWERED, str(error)
        except TimeoutError:
            return TrialVerdict.NOBODY_ANSWERED, f"{asked.url} did not answer in {self._timeout_s + _MARGIN_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return TrialVerdict.NOBODY_ANSWERED, f"{asked.url} could not be asked: {error}"


def _verdict_of(status: int, body: bytes) -> tuple[TrialVerdict, str]:
    message = _message_of(body)
    if status == 200:
        return TrialVerdict.PASSED, ""
    if status >= 500 or status in _NO_VERDICT:
        return TrialVerdict.NOBODY_ANSWERED, f"the router answered {status}: {message}"
    return TrialVerdict.FAILED, message


def _message_of(body: bytes) -> str:
    """Of an answer in OpenAI's error format, else its beginning."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace")
