"""The children of a pool in the order in which they are made: each child after the children that it needs."""

from __future__ import annotations

from collections.abc import Iterator

from pdcluster_operator.api.cluster import ScalingMode
from pdcluster_operator.core.manifests.network import role_policy, router_policy
from pdcluster_operator.core.manifests.pool import Document, Pool
from pdcluster_operator.core.manifests.router import internal_service, router_access, router_deployment, router_service
from pdcluster_operator.core.manifests.standing import (
    discovery_service,
    engine_account,
    pool_secret,
    role_budget,
    role_scaler,
    router_budget,
)
from pdcluster_operator.core.plan.actions import Child, Way
from pdcluster_operator.core.plan.target import Target
from pdcluster_operator.core.rollout.fleet import ROLES
from pdcluster_operator.core.seen.observed import Observed
from pdcluster_protocol.labels import Role

Served = frozenset[tuple[Role, str]]
"""Roles and revisions whose engines routers shall find."""


def standing_children(pool: Pool, target: Target, observed: Observed, served: Served, secret_text: str) -> list[Child]:
    """All children except the workloads of engines.

    Raises:
        ConfigError: The router's overrides cannot be merged.
    """
    once = [*_secrets(pool, observed, secret_text), *_scalers(pool, observed)]
    return [
        *(Child(document, Way.CREATE) for document in once),
        *(Child(document) for document in _applied(pool, target, observed, served)),
    ]


def _applied(pool: Pool, target: Target, observed: Observed, served: Served) -> Iterator[Document]:
    yield engine_account(pool)
    yield from router_access(pool)
    yield from (role_policy(pool, role) for role in ROLES)
    yield router_policy(pool)
    yield from (role_budget(pool, role, target.fleets[role].unavailable) for role in ROLES)
    yield router_budget(pool)
    for role, revision in sorted(served, key=lambda key: (key[0].value, key[1])):
        yield discovery_service(pool, role, revision)
    yield router_service(pool)
    yield internal_service(pool, observed.ready_ports)
    yield router_deployment(pool)


def _secrets(pool: Pool, observed: Observed, text: str) -> list[Document]:
    is_ours = pool.spec.auth.secret_ref is None
    return [pool_secret(pool, text)] if is_ours and not observed.has_secret else []


def _scalers(pool: Pool, observed: Observed) -> list[Document]:
    """Scalers that are not there yet, if scaling is external. Otherwise a pool has no scalers: then ``kubectl scale``
    fails instead of having no effect."""
    if pool.spec.scaling.mode is not ScalingMode.EXTERNAL:
        return []
    there = {scaler.role for scaler in observed.scalers}
    return [role_scaler(pool, role) for role in ROLES if role not in there]
