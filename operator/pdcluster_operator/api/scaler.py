"""PDRoleScaler: one role's number of replicas with a ``scale`` subresource, for HPA, KEDA and ``kubectl scale``.

A CRD has one ``scale`` for each kind, and a PDCluster has two roles, so each role gets an object of its own. The
operator makes it and never writes its ``spec.replicas`` again, so it fights no autoscaler.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pdcluster_operator.api.base import MAX_REPLICAS, ApiModel, Name, Rule
from pdcluster_protocol.labels import Role


class ClusterRef(ApiModel):
    """A PDCluster in the same namespace."""

    name: Name
    """Name of the PDCluster."""


class PDRoleScalerSpec(ApiModel):
    """How many replicas somebody wants for a role."""

    cluster_ref: ClusterRef
    """The PDCluster of the role. Cannot change: the numbers are of one pool."""
    role: Role
    """prefill or decode. Cannot change: an autoscaler's history is of one role."""
    replicas: int = Field(ge=0, le=MAX_REPLICAS)
    """Instances wanted, in [0, 1000]; counts when scaling.mode is External, within scaling.ratio. No default: the
    operator starts with the role's own."""

    rules = (
        Rule(
            holds="self.clusterRef.name == oldSelf.clusterRef.name",
            says="clusterRef cannot change from %s to %s: make a PDRoleScaler of its own",
            values=("oldSelf.clusterRef.name", "self.clusterRef.name"),
            short="clusterRef cannot change: make a PDRoleScaler of its own",
            path=".clusterRef.name",
        ),
        Rule(
            holds="self.role == oldSelf.role",
            says="role cannot change from %s to %s: make a PDRoleScaler of its own",
            values=("oldSelf.role", "self.role"),
            short="role cannot change: make a PDRoleScaler of its own",
            path=".role",
        ),
    )


class PDRoleScalerStatus(ApiModel):
    """The numbers that autoscalers read. Only the operator writes them."""

    replicas: int = Field(default=0, ge=0)
    """Instances of the role that there are."""
    selector: str = Field(default="", max_length=1024)
    """Label selector of the role's pods, as text."""


class PDRoleScaler(ApiModel):
    """The number of replicas of one role of a PDCluster, for HPA, KEDA and kubectl scale."""

    api_version: Literal["pdcluster.dev/v1alpha1"]
    kind: Literal["PDRoleScaler"]
    metadata: dict[str, Any]
    """Name and namespace, those of the PDCluster's."""
    spec: PDRoleScalerSpec
    """How many replicas somebody wants."""
    status: PDRoleScalerStatus | None = None
    """The numbers that autoscalers read."""
