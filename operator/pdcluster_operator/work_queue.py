"""Runs ``work`` for keys: at most one task for a key, a bounded number at a time, each with a deadline.

``core/queueing.py`` decides which key runs, and when. A run that fails is logged once, here, and tried again later.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable, Iterable
from enum import Enum
from typing import Generic, TypeVar

from pdcluster_operator.clock import steady_s
from pdcluster_operator.core.queueing import KeyQueue, RetryPace
from pdcluster_operator.errors import ApiUnavailable, Conflict, KubeError

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


class RunOutcome(Enum):
    """How a run ended. The values are labels of a metric."""

    DONE = "done"
    CONFLICT = "conflict"
    FAILED = "failed"


OnRun = Callable[[RunOutcome, float], None]
"""Called after each run: how the run ended, and how many seconds it took."""


class WorkQueue(Generic[K]):
    """The keys, and the tasks that work on them. Event loop only. One task runs ``run``; any task may call ``add``."""

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        *,
        num_workers: int,
        limit_s: float,
        on_run: OnRun,
        pace: RetryPace | None = None,
    ) -> None:
        """``work`` returns the seconds until the next look, or None for no other. ``limit_s``: seconds for one run."""
        self._work = work
        self._limit_s = limit_s
        self._on_run = on_run
        self._keys: KeyQueue[K] = KeyQueue(max_running=num_workers, pace=pace or RetryPace())
        self._is_changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: K) -> None:
        """Run ``work`` for this key soon."""
        self._keys.add(key, steady_s())
        self._is_changed.set()

    def add_all(self, keys: Iterable[K]) -> None:
        for key in keys:
            self.add(key)

    def overdue_s(self) -> float:
        """Seconds for which the oldest key has been due or running."""
        return self._keys.overdue_s(steady_s())

    async def run(self) -> None:
        """Run until cancelled. When this ends, all its tasks were cancelled and have ended."""
        async with asyncio.TaskGroup() as runs:
            while True:
                self._is_changed.clear()
                while (key := self._keys.start_next(steady_s())) is not None:
                    runs.create_task(self._run(key), name=f"reconcile {key}")
                await self._until_next()

    async def _until_next(self) -> None:
        due = self._keys.next_due()
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - steady_s())):
                await self._is_changed.wait()
        except TimeoutError:
            return

    async def _run(self, key: K) -> None:
        began = steady_s()
        outcome = await self._run_once(key)
        self._on_run(outcome, steady_s() - began)
        self._is_changed.set()

    async def _run_once(self, key: K) -> RunOutcome:
        try:
            async with asyncio.timeout(self._limit_s):
                wake_after_s = await self._work(key)
        except Conflict as error:
            logger.info("reconcile out of date cluster=%s reason=%s", key, error)
            return self._failed(key, RunOutcome.CONFLICT)
        except (KubeError, TimeoutError) as error:
            logger.warning("reconcile failed cluster=%s reason=%s", key, error or f"not done in {self._limit_s:g} s")
            return self._failed(key, RunOutcome.FAILED, _asked_s(error))
        except Exception:
            # The top of a task: a bug in one PDCluster's reconcile must not stop all others.
            logger.exception("reconcile broke cluster=%s", key)
            return self._failed(key, RunOutcome.FAILED)
        self._keys.finish(key, steady_s(), wake_after_s)
        return RunOutcome.DONE

    def _failed(self, key: K, outcome: RunOutcome, asked_s: float = 0.0) -> RunOutcome:
        self._keys.fail(key, steady_s(), chance=random.random(), asked_s=asked_s)  # noqa: S311 - spreads load
        return outcome


def _asked_s(error: Exception) -> float:
    return error.retry_after_s if isinstance(error, ApiUnavailable) else 0.0
