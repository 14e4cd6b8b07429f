"""PodDisruptionBudgets: how many pods a node drain may take at once.

A role may lose what a rollout may lose, but at least one instance: a budget of none would hold up node drains for
ever. An evicted engine finishes its requests as any removed one does.
"""

from __future__ import annotations

from pdcluster_operator.core import names
from pdcluster_operator.core.manifests.pool import (
    ROUTER,
    Document,
    Pool,
    engine_selector,
    make_object,
    metadata_of,
    role_labels,
    router_selector,
)
from pdcluster_protocol.labels import Role


def role_budget(pool: Pool, role: Role, unavailable: int) -> Document:
    """``unavailable``: instances that a rollout may take. Of a group on several nodes all pods count: one that is
    evicted takes the whole group with it, which uses the budget up until the group is back."""
    metadata = metadata_of(pool, names.role_name(pool.name, role), role.value, role_labels(role))
    return _budget(metadata, engine_selector(pool, role), max(unavailable, 1))


def router_budget(pool: Pool) -> Document:
    return _budget(metadata_of(pool, names.child_name(pool.name, ROUTER), ROUTER), router_selector(pool), 1)


def _budget(metadata: Document, selector: dict[str, str], unavailable: int) -> Document:
    spec = {
        "selector": {"matchLabels": selector},
        "maxUnavailable": unavailable,
        # A pod that serves nobody must not keep a node.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return make_object("policy/v1", "PodDisruptionBudget", metadata, spec=spec)
