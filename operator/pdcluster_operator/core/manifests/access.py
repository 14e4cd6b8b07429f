"""The pool's secret, the engines' ServiceAccount, and the scalers: small children that are made once.

What is made once is never applied again. A second secret would shut out everybody who holds the first; a second number
in a scaler would fight the autoscaler that moved it.
"""

from __future__ import annotations

from base64 import b64encode

from pdcluster_operator.api.base import API_VERSION
from pdcluster_operator.core import names
from pdcluster_operator.core.manifests.pool import (
    ENGINE,
    SECRET_KEY,
    Document,
    Pool,
    engine_selector,
    make_object,
    metadata_of,
    role_labels,
)
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role


def pool_secret(pool: Pool, text: str) -> Document:
    """``text``: random, 32 characters or more; the shell draws it."""
    metadata = metadata_of(pool, names.child_name(pool.name, SECRET_KEY), SECRET_KEY)
    data = {SECRET_KEY: b64encode(text.encode()).decode()}
    return make_object("v1", "Secret", metadata, type="Opaque", immutable=True, data=data)


def engine_account(pool: Pool) -> Document:
    """Engines ask the API server for nothing, and get no token."""
    metadata = metadata_of(pool, names.child_name(pool.name, ENGINE), ENGINE)
    return make_object("v1", "ServiceAccount", metadata, automountServiceAccountToken=False)


def role_scaler(pool: Pool, role: Role) -> Document:
    """Starts with the role's own replicas."""
    metadata = metadata_of(pool, names.role_name(pool.name, role), role.value, role_labels(role))
    spec = {"clusterRef": {"name": pool.name}, "role": role.value, "replicas": pool.role(role).replicas}
    return make_object(API_VERSION, "PDRoleScaler", metadata, spec=spec)


def scaler_selector(pool: Pool, role: Role) -> str:
    """For a scaler's status: one pod for each instance, so that an average over pods is one over instances."""
    found = {**engine_selector(pool, role), labels.LEADER: "true"}
    return ",".join(f"{name}={value}" for name, value in found.items())
