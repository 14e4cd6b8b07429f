"""Names of children: ``{cluster}-{role}[-{revision}-{template}]``, never too long, valid for every kind.

A Service's name is the strictest: a DNS-1035 label (letters, digits, dashes, a letter first, 63 characters), so every
child gets one. A PDCluster may have dots, a digit first, or 253 characters; then the child's name carries a hash of the
whole, so that two clusters never share a child.
"""

from __future__ import annotations

import hashlib
from typing import Final

from pdcluster_protocol.labels import Role

MAX_LABEL: Final = 63
"""A DNS label, and a label's value (Kubernetes)."""
MAX_WORKLOAD: Final = MAX_LABEL - 11
"""A Deployment's ReplicaSets add a dash and at most 10 characters; so many still fit into a label of their pods."""
_HASH_DIGITS: Final = 8


def workload_name(cluster: str, role: Role, revision: str, template: str) -> str:
    """Of the Deployment or LeaderWorkerSet of one (role, revision, template); at most 52 characters."""
    return _fitted(f"{cluster}-{role.value}-{revision}-{template}", MAX_WORKLOAD)


def discovery_service_name(cluster: str, role: Role, revision: str) -> str:
    """Of the headless Service whose EndpointSlices the router watches."""
    return _fitted(f"{cluster}-{role.value}-{revision}", MAX_LABEL)


def role_name(cluster: str, role: Role) -> str:
    """Of what there is once for each role: its PDRoleScaler, PodDisruptionBudget, NetworkPolicy."""
    return _fitted(f"{cluster}-{role.value}", MAX_LABEL)


def child_name(cluster: str, part: str) -> str:
    """Of what there is once for each cluster; ``part`` such as ``router``. At most 52, since some are Deployments."""
    return _fitted(f"{cluster}-{part}", MAX_WORKLOAD)


def cluster_label(cluster: str) -> str:
    """Value of the cluster's label: the name itself unless it is longer than a value may be."""
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
