"""The labels that the operator writes and the router reads: which PDCluster owns a child, and
which engines may be paired.

Kubernetes allows values of at most 63 characters of ``[A-Za-z0-9._-]``. The operator's names and hashes always fit.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Role(Enum):
    """An engine's part in a pool; the value of ``ROLE`` on engines and the key under ``spec.roles``."""

    __hash__ = object.__hash__  # Enum's own is written in Python, and the router looks up roles for each request.

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


CLUSTER: Final = "pdcluster.dev/cluster"
"""Name of the PDCluster, or its short form where the name is longer than a label's value."""
ROLE: Final = "pdcluster.dev/role"
REVISION: Final = "pdcluster.dev/revision"
"""Hash over what both roles must share: the router pairs engines of one revision only."""
TEMPLATE: Final = "pdcluster.dev/template"
"""Hash over the pod template of one role."""
LEADER: Final = "pdcluster.dev/leader"
"""``true`` on the pod of an instance that answers HTTP: its only one, or the first of a group on several nodes."""
SCHEME: Final = "pdcluster.dev/scheme"
"""``https`` on Services of a pool with TLS inside, for monitoring; others have none."""
GROUP_INDEX: Final = "leaderworkerset.sigs.k8s.io/group-index"
"""Index of the pod's group, from 0. Written by LeaderWorkerSet (LWS v0.9.0 ``api/leaderworkerset/v1``)."""

NAME: Final = "app.kubernetes.io/name"
INSTANCE: Final = "app.kubernetes.io/instance"
COMPONENT: Final = "app.kubernetes.io/component"
PART_OF: Final = "app.kubernetes.io/part-of"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"

APP_NAME: Final = "pdcluster"
"""Value of ``NAME`` and ``PART_OF``."""
MANAGER: Final = "pdcluster-operator"
"""Value of ``MANAGED_BY``, and the operator's field manager."""
