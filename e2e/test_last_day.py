"""The last day: what was asked for is taken away, and nothing of it stays."""

from __future__ import annotations

from e2e.cluster import eventually
from e2e.subject import SharedPool

GONE_S = 180.0
"""Engines drain, and a container has half a minute to end."""


def test_a_deleted_pool_leaves_nothing(shared: SharedPool) -> None:
    pool = shared.subject
    assert pool.leftovers(), "whatever is looked for, a living pool has it"
    pool.cluster.run("-n", pool.namespace, "delete", "pdcluster", pool.name)
    eventually(lambda: not pool.leftovers(), lambda: f"left: {pool.leftovers()}", GONE_S)
