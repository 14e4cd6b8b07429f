"""Whose numbers count, and what becomes of those that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.operator_cluster import make_cluster
from operator_cases.objects import D, P
from pdcluster_operator.core.plan.target import wanted_of
from pdcluster_protocol.labels import Role

EXTERNAL = {"spec.scaling.mode": "External", f"{P}.replicas": 2, f"{D}.replicas": 3}
RATIO = {**EXTERNAL, "spec.scaling.ratio": {"min": 0.25, "max": 1}}


def wanted(changes: dict[str, Any], **scalers: int) -> tuple[int, int]:
    given = {Role(name): replicas for name, replicas in scalers.items()}
    found = wanted_of(make_cluster(changes).spec, given)
    return found[Role.PREFILL], found[Role.DECODE]


@pytest.mark.parametrize(
    ("changes", "scalers", "numbers"),
    [
        ({f"{P}.replicas": 2, f"{D}.replicas": 3}, {}, (2, 3)),
        ({f"{P}.replicas": 2, f"{D}.replicas": 3}, {"prefill": 9, "decode": 9}, (2, 3)),
        ({f"{P}.replicas": 0, f"{D}.replicas": 0}, {}, (0, 0)),
        (EXTERNAL, {}, (2, 3)),
        (EXTERNAL, {"decode": 7}, (2, 7)),
        (EXTERNAL, {"prefill": 5, "decode": 7}, (5, 7)),
        (EXTERNAL, {"prefill": 0, "decode": 0}, (0, 0)),
        (EXTERNAL, {"prefill": 0, "decode": 7}, (1, 7)),
        (RATIO, {"prefill": 1, "decode": 8}, (2, 8)),
        (RATIO, {"prefill": 8, "decode": 1}, (8, 8)),
    ],
)
def test_wanted(changes: dict[str, Any], scalers: dict[str, int], numbers: tuple[int, int]) -> None:
    assert wanted(changes, **scalers) == numbers
