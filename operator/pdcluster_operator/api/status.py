"""The observed state: conditions, counts and addresses. Only the operator writes it.

Nothing here is a memory: a new look at the cluster comes to the same status, except for the times in conditions.
"""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Annotated

from pydantic import Field

from pdcluster_operator.api.base import ApiModel, map_by


class ConditionStatus(Enum):
    """Kubernetes' own words."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class WireCondition(ApiModel):
    """One fact about the object, as Kubernetes' ``metav1.Condition``."""

    type: str = Field(min_length=1, max_length=316)
    """Accepted, PrefillReady, DecodeReady, RouterReady, TransferVerified, Progressing, Degraded or Ready."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: str = Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    """Why, in one CamelCase word, for programs."""
    message: str = Field(max_length=32768)
    """Why, for people: who, the values and the cure."""
    observed_generation: int = Field(default=0, ge=0)
    """metadata.generation that this was found for."""
    last_transition_time: datetime
    """When status changed last."""
    last_update_time: datetime | None = None
    """Of Progressing: when there was progress, or a changed spec, last. The progress deadline is counted from here."""


class RoleStatus(ApiModel):
    """Counts of one role's instances."""

    wanted: int = Field(default=0, ge=0)
    """Instances that there should be, after scaling."""
    replicas: int = Field(default=0, ge=0)
    """Instances that there are, of all revisions, without those that are going."""
    updated: int = Field(default=0, ge=0)
    """Of these, instances of what the spec asks for."""
    ready: int = Field(default=0, ge=0)
    """Instances that are ready, of all revisions."""
    updated_ready: int = Field(default=0, ge=0)
    """Instances of what the spec asks for that are ready."""
    terminating: int = Field(default=0, ge=0)
    """Pods that are finishing their work before they go."""
    summary: str = Field(default="", max_length=64)
    """Ready/wanted x tensor parallelism, for kubectl get: 2/2x4."""


class RolesStatus(ApiModel):
    """Counts of both roles."""

    prefill: RoleStatus = RoleStatus()
    """Engines that compute prompts."""
    decode: RoleStatus = RoleStatus()
    """Engines that generate tokens."""


class RouterStatus(ApiModel):
    """Counts of the routers."""

    replicas: int = Field(default=0, ge=0)
    """Routers that there are."""
    ready: int = Field(default=0, ge=0)
    """Routers that are ready."""


class PDClusterStatus(ApiModel):
    """The observed state."""

    observed_generation: int = Field(default=0, ge=0)
    """metadata.generation that this status was found for."""
    conditions: Annotated[tuple[WireCondition, ...], Field(max_length=32), map_by("type")] = ()
    """Statements that are true or not, each with its reason."""
    roles: RolesStatus = RolesStatus()
    """Counts of both roles."""
    router: RouterStatus = RouterStatus()
    """Counts of the routers."""
    model: str | None = Field(default=None, max_length=256)
    """Name that clients ask for."""
    url: str | None = Field(default=None, max_length=2048)
    """Where clients find the OpenAI API, within the cluster."""
    target: str | None = Field(default=None, max_length=63)
    """The target of the spec: revision, prefill template and decode template, with dashes between."""
    verified_target: str | None = Field(default=None, max_length=63)
    """Target through which a real request was last answered with KV that was pushed."""


def summary_of(*, ready: int, wanted: int, tensor: int) -> str:
    """One role in one word: 2 of 3 ready, each split over 4: ``2/3x4``."""
    return f"{ready}/{wanted}x{tensor}"
