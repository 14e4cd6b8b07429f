"""The small children that stand beside engines and routers: Secret, ServiceAccount, scalers, discovery, budgets.

The Secret and the scalers are created once and never applied again. A second secret would shut out all engines and
routers that have the first. A number that we write to a scaler would fight the autoscaler that has set another.

Routers find engines by the EndpointSlices of headless Services, one Service for each role and revision. Kubernetes
copies a Service's labels to its slices, and routers read role and revision from them. Slices also list engines that are
not ready or terminate, and mark them so; ``publishNotReadyAddresses`` would mark them all ready. The names of these
Services are never resolved.

PodDisruptionBudgets say how many pods node drains may take at once. A role may lose as many instances as in a rollout,
and at least one: a budget of 0 would hold up node drains for ever. An evicted engine finishes its requests like any
other removed engine.
"""

from __future__ import annotations

from base64 import b64encode

from pdcluster_operator.core import names
from pdcluster_operator.core.manifests import pool_tls
from pdcluster_operator.core.manifests.pool import (
    ENGINE,
    HTTP,
    PORT,
    ROUTER,
    SECRET_KEY,
    Document,
    Pool,
    engine_selector,
    make_object,
    metadata_of,
    role_labels,
    router_selector,
)
from pdcluster_operator.kinds import DISRUPTION_BUDGET, SCALER, SECRET, SERVICE, SERVICE_ACCOUNT
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role


def pool_secret(pool: Pool, text: str) -> Document:
    """The pool's Secret. ``text``: random, 32 characters or more; the caller draws it."""
    metadata = metadata_of(pool, names.child_name(pool.name, SECRET_KEY), SECRET_KEY)
    data = {SECRET_KEY: b64encode(text.encode()).decode()}
    return make_object(SECRET, metadata, type="Opaque", immutable=True, data=data)


def engine_account(pool: Pool) -> Document:
    """The engines' ServiceAccount, without a token: engines ask the API server for nothing."""
    metadata = metadata_of(pool, names.child_name(pool.name, ENGINE), ENGINE)
    return make_object(SERVICE_ACCOUNT, metadata, automountServiceAccountToken=False)


def role_scaler(pool: Pool, role: Role) -> Document:
    """The role's PDRoleScaler, which starts with the spec's replicas."""
    metadata = metadata_of(pool, names.role_name(pool.name, role), role.value, role_labels(role))
    spec = {"clusterRef": {"name": pool.name}, "role": role.value, "replicas": pool.role(role).replicas}
    return make_object(SCALER, metadata, spec=spec)


def scaler_selector(pool: Pool, role: Role) -> str:
    """Selects one pod of each instance, for a scaler's status. So an average over pods is an average over instances."""
    found = {**engine_selector(pool, role), labels.LEADER: "true"}
    return ",".join(f"{name}={value}" for name, value in found.items())


def discovery_service(pool: Pool, role: Role, revision: str) -> Document:
    """The headless Service of one role and revision. For each instance it lists the pod that answers HTTP."""
    name = names.discovery_service_name(pool.name, role, revision)
    port = {"name": HTTP, "port": PORT, "targetPort": HTTP, "protocol": "TCP"}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": False,
        "selector": {**engine_selector(pool, role, revision), labels.LEADER: "true"},
        "ports": [port | pool_tls.app_protocol(pool)],
    }
    extra = {**role_labels(role, revision), **pool_tls.service_labels(pool)}
    return make_object(SERVICE, metadata_of(pool, name, role.value, extra), spec=spec)


def role_budget(pool: Pool, role: Role, unavailable: int) -> Document:
    """The budget of a role's engines. ``unavailable``: instances that a rollout may take.

    All pods of a group count. An evicted pod takes its whole group with it, so the budget is used up until the group is
    back.
    """
    metadata = metadata_of(pool, names.role_name(pool.name, role), role.value, role_labels(role))
    return _budget(metadata, engine_selector(pool, role), max(unavailable, 1))


def router_budget(pool: Pool) -> Document:
    return _budget(metadata_of(pool, names.child_name(pool.name, ROUTER), ROUTER), router_selector(pool), 1)


def _budget(metadata: Document, selector: dict[str, str], unavailable: int) -> Document:
    spec = {
        "selector": {"matchLabels": selector},
        "maxUnavailable": unavailable,
        # A pod that is not ready must not hold up a node drain.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return make_object(DISRUPTION_BUDGET, metadata, spec=spec)
