"""Which engines of a pool still have something to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import Cluster
from e2e.leaving import IDLE_S, SOON_S, Departure, LastIdleness, busy, hasty, late, wait_begun
from e2e.subject import Subject

from patience import PATIENCE_S
from pdcluster_cli.pod.idleness import Work
from pdcluster_protocol.labels import Role

IDLE, BUSY = Work(0, 0, 0.0, 7), Work(1, 0, 0.25, 7)


@dataclass(frozen=True, slots=True)
class Pool(Subject):
    """``ready``: whether each engine is, by its name; all are of one role."""

    role: Role = Role.PREFILL
    ready: tuple[tuple[str, bool], ...] = (("p1", True),)

    def pods(self, role: Role) -> list[dict[str, Any]]:
        conditions = {name: [{"type": "Ready", "status": str(is_ready)}] for name, is_ready in self.ready}
        return [
            {"metadata": {"name": name}, "status": {"podIP": f"192.0.2.{name[1]}", "conditions": conditions[name]}}
            for name in conditions
            if role is self.role
        ]


def pool(role: Role, *ready: tuple[str, bool]) -> Subject:
    return Pool(Cluster("kubectl", Path("nowhere")), "tiny", role=role, ready=ready)


@pytest.mark.parametrize(
    ("work", "is_ready", "expected"),
    [
        (IDLE, True, {}),
        (Work(1, 0, 0.0, 7), True, {"p1": "1 running, 0 waiting, 0.00% of KV memory held"}),
        (Work(0, 0, 0.25, 7), True, {"p1": "0 running, 0 waiting, 25.00% of KV memory held"}),
        (None, True, {"p1": "no answer"}),
        (None, False, {}),
    ],
    ids=["idle", "a request", "blocks alone", "no answer", "not ready, so not asked"],
)
def test_an_engine_is_idle_when_it_says_so(work: Work | None, is_ready: bool, expected: dict[str, str]) -> None:
    assert busy(pool(Role.PREFILL, ("p1", is_ready)), lambda _: work) == expected


def test_who_goes_with_something_to_do_is_hasty_and_who_is_not_left_alone_is_late() -> None:
    well, early, slow = (
        Departure(name, took_s, idle_s)
        for name, took_s, idle_s in (("a", SOON_S, IDLE_S), ("b", SOON_S, IDLE_S - 0.1), ("c", SOON_S + 0.1, IDLE_S))
    )
    assert hasty([well, early, slow]) == [early]
    assert late([well, early, slow]) == [slow]


def test_an_engine_is_chosen_when_it_is_seen_with_enough_answers_that_have_begun_and_the_wait_ends() -> None:
    """First nothing has begun, and requests wait; then one engine does not answer; the second has enough before the
    first."""
    told = [Work(0, 8, 0.5, 7), Work(2, 6, 0.5, 7), None, Work(2, 0, 0.5, 9), Work(2, 0, 0.5, 9), Work(3, 0, 0.5, 9)]
    asked: list[str] = []

    def ask(url: str) -> Work | None:
        asked.append(url)
        return told[len(asked) - 1]

    two = pool(Role.DECODE, ("d1", True), ("d2", True))
    assert wait_begun(two, Role.DECODE, 3, PATIENCE_S, ask) == "d2"
    assert asked == ["http://192.0.2.1:8000", "http://192.0.2.2:8000"] * 3
    with pytest.raises(TimeoutError, match="no decode engine was seen with 3 answers under way within 0 s"):
        wait_begun(two, Role.DECODE, 3, 0.0, lambda _: Work(2, 9, 0.5, 7))


Look = tuple[float, Work | None, float]
"""When the engine was asked, what it answered (None: nothing), when that was heard."""


def idle_s_after(*looks: Look, gone_at: float) -> float:
    """Of an engine that was looked at from second 0 on."""
    idleness = LastIdleness(0.0)
    for asked_at, work, heard_at in looks:
        idleness.hear(work, asked_at=asked_at, now=heard_at)
    return idleness.seconds(now=gone_at)


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        (((1.0, BUSY, 1.1), (1.5, IDLE, 1.6), (4.5, None, 4.6), (5.0, None, 5.1)), 3.6),
        (((1.0, BUSY, 1.1), (1.5, None, 1.6), (2.0, None, 2.1)), 0.6),
        (((1.0, IDLE, 1.1), (2.0, Work(0, 0, 0.0, 8), 2.1), (3.0, None, 3.1)), 1.1),
        (((1.0, BUSY, 3.0), (3.5, IDLE, 4.2), (4.7, None, 4.8)), 3.8),
        (((1.0, BUSY, 1.1), (1.6, None, 6.6), (7.1, IDLE, 7.2), (7.7, None, 7.8)), 6.8),
        (((1.0, BUSY, 1.1), (1.5, IDLE, 1.6)), 19.0),
    ],
    ids=[
        "until it answered no more",
        "it went with work in its hands",
        "a request came and ended between two looks",
        "a late answer takes nothing away",
        "once silent, then there again",
        "it answered until its pod was gone",
    ],
)
def test_an_engine_was_idle_from_its_last_work_until_it_fell_silent(looks: tuple[Look, ...], expected: float) -> None:
    assert idle_s_after(*looks, gone_at=20.0) == pytest.approx(expected)
