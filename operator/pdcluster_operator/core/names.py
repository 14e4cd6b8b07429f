"""Names of children, such as ``{cluster}-{role}[-{revision}[-{template}]]``: never too long, valid for every kind.

The rule for a Service's name is the strictest: a DNS-1035 label (letters, digits, dashes, a letter first, at most 63
characters). Every child gets such a name. A PDCluster's own name is such a label too (a rule of the CRD), but a child's
may get too long. Then it is cut and ends with a hash of the whole name, so that two clusters never share a child.
"""

from __future__ import annotations

import hashlib
from typing import Final

from pdcluster_operator.api.base import MAX_LABEL
from pdcluster_protocol.labels import Role

MAX_WORKLOAD: Final = MAX_LABEL - 11
"""A ReplicaSet's name adds a dash and at most 10 characters to its Deployment's, and must fit into a pod's label."""
_HASH_DIGITS: Final = 8


def workload_name(cluster: str, role: Role, revision: str, template: str) -> str:
    """Name of the Deployment or LeaderWorkerSet of one (role, revision, template): at most 52 characters."""
    return _fitted(f"{cluster}-{role.value}-{revision}-{template}", MAX_WORKLOAD)


def discovery_service_name(cluster: str, role: Role, revision: str) -> str:
    """Name of the headless Service whose EndpointSlices routers watch."""
    return _fitted(f"{cluster}-{role.value}-{revision}", MAX_LABEL)


def role_name(cluster: str, role: Role) -> str:
    """Name of each child that a role has once: PDRoleScaler, PodDisruptionBudget, NetworkPolicy."""
    return _fitted(f"{cluster}-{role.value}", MAX_LABEL)


def child_name(cluster: str, part: str) -> str:
    """Name of a child that a PDCluster has once. ``part``: such as ``router``. At most 52 characters."""
    return _fitted(f"{cluster}-{part}", MAX_WORKLOAD)


def cluster_label(cluster: str) -> str:
    """Value of the cluster's label: the name. Of a name longer than a value may be, the beginning and a hash."""
    return cluster if len(cluster) <= MAX_LABEL else _cut(cluster, MAX_LABEL)


def _fitted(name: str, limit: int) -> str:
    label = name.replace(".", "-")
    if not label[0].isalpha():
        label = f"pd-{label}"
    return name if label == name and len(name) <= limit else _cut(label, limit, of=name)


def _cut(label: str, limit: int, of: str = "") -> str:
    """The beginning of ``label`` and a hash of the whole name, together at most ``limit``."""
    digest = hashlib.sha256((of or label).encode()).hexdigest()[:_HASH_DIGITS]
    return f"{label[: limit - _HASH_DIGITS - 1].rstrip('-.')}-{digest}"
