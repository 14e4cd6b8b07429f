"""Runs of keys: one at a time for each, bounded, with deadlines, and no failure that stops the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from fakes.router import until
from pdcluster_operator.core.queueing import RetryPace
from pdcluster_operator.errors import ApiUnavailable, Conflict
from pdcluster_operator.work_queue import RunOutcome, WorkQueue

pytestmark = pytest.mark.anyio

QUICK = RetryPace(gather_s=0.001, first_s=0.01, most_s=0.05)


@asynccontextmanager
async def running(
    work: Callable[[str], Awaitable[float | None]],
    *,
    num_workers: int = 4,
    limit_s: float = 5.0,
    pace: RetryPace = QUICK,
) -> AsyncIterator[tuple[WorkQueue[str], list[RunOutcome]]]:
    outcomes: list[RunOutcome] = []
    queue = WorkQueue(
        work, num_workers=num_workers, limit_s=limit_s, pace=pace, on_run=lambda outcome, _: outcomes.append(outcome)
    )
    task = asyncio.create_task(queue.run())
    try:
        yield queue, outcomes
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


async def test_a_key_runs_once_at_a_time_and_once_more_for_what_came_meanwhile() -> None:
    runs: list[str] = []
    is_running, may_end = 0, asyncio.Event()

    async def work(key: str) -> None:
        nonlocal is_running
        is_running += 1
        assert is_running == 1
        runs.append(key)
        await may_end.wait()
        is_running -= 1

    async with running(work) as (queue, _):
        queue.add("a")
        await until(lambda: runs == ["a"])
        for _ in range(5):
            queue.add("a")
        may_end.set()
        await until(lambda: runs == ["a", "a"] and not len(queue))
        await asyncio.sleep(0.02)
        assert runs == ["a", "a"]


async def test_no_more_run_at_once_than_there_are_workers() -> None:
    running_now, most = 0, 0

    async def work(key: str) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0.001)
        running_now -= 1

    async with running(work, num_workers=3) as (queue, outcomes):
        queue.add_all(f"k{i}" for i in range(20))
        await until(lambda: len(outcomes) == 20)
    assert most == 3


async def test_what_fails_is_tried_again_until_it_does_not() -> None:
    errors: list[Exception] = [ApiUnavailable("away"), Conflict("old"), ValueError("a bug of ours"), TimeoutError()]

    async def work(key: str) -> None:
        if errors:
            raise errors.pop(0)

    async with running(work) as (queue, outcomes):
        queue.add("a")
        await until(lambda: RunOutcome.DONE in outcomes)
        assert outcomes == [
            RunOutcome.FAILED,
            RunOutcome.CONFLICT,
            RunOutcome.FAILED,
            RunOutcome.FAILED,
            RunOutcome.DONE,
        ]


async def test_who_is_told_when_to_come_back_comes_no_sooner() -> None:
    runs: list[str] = []

    async def work(key: str) -> None:
        runs.append(key)
        raise ApiUnavailable("busy", retry_after_s=3600)

    async with running(work, pace=RetryPace(gather_s=0.001, first_s=0.001, most_s=3600)) as (queue, outcomes):
        queue.add("a")
        await until(lambda: outcomes == [RunOutcome.FAILED])
        await asyncio.sleep(0.05)
        assert runs == ["a"]


async def test_one_that_never_ends_is_ended_and_holds_up_nobody() -> None:
    seen: list[str] = []

    async def work(key: str) -> None:
        seen.append(key)
        if key == "stuck":
            await asyncio.Event().wait()

    async with running(work, limit_s=0.05, num_workers=1) as (queue, outcomes):
        queue.add("stuck")
        await until(lambda: seen == ["stuck"])
        queue.add("other")
        await until(lambda: "other" in seen)
        assert outcomes[0] is RunOutcome.FAILED


async def test_a_plan_wakes_its_key() -> None:
    runs = 0

    async def work(key: str) -> float | None:
        nonlocal runs
        runs += 1
        return 0.02 if runs == 1 else None

    async with running(work) as (queue, _):
        queue.add("a")
        await until(lambda: runs == 2)
        assert queue.overdue_s() == 0.0


async def test_when_a_term_ends_every_run_has_ended() -> None:
    is_cleaned_up, has_begun = False, asyncio.Event()

    async def work(key: str) -> None:
        nonlocal is_cleaned_up
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cleaned_up = True

    async with running(work) as (queue, _):
        queue.add("a")
        await has_begun.wait()
    assert is_cleaned_up
