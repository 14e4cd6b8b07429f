"""Which engines of a pool still have something to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import Cluster
from e2e.leaving import IDLE_S, SOON_S, Departure, busy, hasty, late
from e2e.subject import Subject

from pdcluster_cli.idleness import Work
from pdcluster_protocol.labels import Role

IDLE = Work(0, 0, 0.0, 7)


@dataclass(frozen=True, slots=True)
class OnePrefillEngine(Subject):
    has_started: bool = True

    def pods(self, role: Role) -> list[dict[str, Any]]:
        ready = {"type": "Ready", "status": str(self.has_started)}
        pod = {"metadata": {"name": "p"}, "status": {"podIP": "192.0.2.1", "conditions": [ready]}}
        return [pod] if role is Role.PREFILL else []


def pool(*, has_started: bool = True) -> Subject:
    return OnePrefillEngine(Cluster("kubectl", Path("nowhere")), "tiny", has_started=has_started)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (IDLE, {}),
        (Work(1, 0, 0.0, 7), {"p": "1 running, 0 waiting, 0.00% of KV memory held"}),
        (Work(0, 0, 0.25, 7), {"p": "0 running, 0 waiting, 25.00% of KV memory held"}),
        (None, {"p": "no answer"}),
    ],
    ids=["idle", "a request", "blocks alone", "no answer"],
)
def test_an_engine_is_idle_when_it_says_so(work: Work | None, expected: dict[str, str]) -> None:
    assert busy(pool(), lambda _: work) == expected


def test_who_goes_with_something_to_do_is_hasty_and_who_is_not_left_alone_is_late() -> None:
    well, early, slow = (
        Departure(name, took_s, idle_s)
        for name, took_s, idle_s in (("a", SOON_S, IDLE_S), ("b", SOON_S, IDLE_S - 0.1), ("c", SOON_S + 0.1, IDLE_S))
    )
    assert hasty([well, early, slow]) == [early]
    assert late([well, early, slow]) == [slow]


def test_an_engine_that_is_not_ready_is_not_asked() -> None:
    assert busy(pool(has_started=False), lambda _: None) == {}
