"""The workload of one (role, revision, template): a Deployment, or a LeaderWorkerSet over several nodes.

A workload's template never changes, for the template's hash is part of the workload's name. So our writes never make
Kubernetes roll a workload: the planner moves replicas from one workload to the next. If somebody else changes a field,
the operator sets it back and says so in an Event. If Kubernetes rolls the pods for such a change, it needs no further
devices, because it replaces one pod at a time without surge.

Source of truth for groups: ``leaderworkerset.x-k8s.io/v1`` (LWS 0.6 to 1.0), ``api/leaderworkerset/v1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdcluster_operator.core import names
from pdcluster_operator.core.manifests.command import PodPlace
from pdcluster_operator.core.manifests.engine_pod import engine_template
from pdcluster_operator.core.manifests.pool import (
    Document,
    Pool,
    engine_selector,
    labelled,
    make_object,
    metadata_of,
    role_labels,
)
from pdcluster_operator.core.revision import revision_of, template_of
from pdcluster_operator.kinds import DEPLOYMENT, LEADER_WORKER_SET, Kind
from pdcluster_protocol import labels
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role

_START_LIMIT_S: Final = 24 * 3600
"""Seconds for the Deployment's own Progressing condition. We do not read it: ours is in the PDCluster's status."""


@dataclass(frozen=True, slots=True)
class WorkloadDesign:
    """One workload as the spec asks for it."""

    name: str
    kind: Kind
    """A Deployment or a LeaderWorkerSet."""
    role: Role
    revision: str
    template: str
    templates: tuple[Document, ...]
    """Pod templates, without the label that has their hash: one of a single pod, or those of leader and worker."""

    @property
    def labels(self) -> dict[str, str]:
        return role_labels(self.role, self.revision, self.template)


_OF_DECODE_ALONE: Final = "minPushTokens"
"""Field of ``transfer`` that changes neither KV nor prefill, so it is not part of the revision."""


def revision_for(pool: Pool) -> str:
    """The spec's revision. If the spec names no protocol, the protocol that is used counts."""
    spec = pool.spec
    transfer = {**spec.transfer.to_wire(), "protocol": spec.transfer_protocol.value, _OF_DECODE_ALONE: None}
    args = {role: pool.role(role).engine_args for role in Role}
    env = {role: {one.name: one.to_wire() for one in pool.role(role).env} for role in Role}
    return revision_of(
        model=spec.model.to_wire(),
        image=spec.image,
        transfer=transfer,
        engine_args=args,
        env=env,
        tls=spec.tls.to_wire() if spec.tls else None,
    )


def design_workload(pool: Pool, role: Role, revision: str) -> WorkloadDesign:
    """The workload that the spec asks for.

    Raises:
        ConfigError: Overrides do not merge, or change the engines' key, or vLLM cannot spread the split over nodes.
    """
    spec = pool.role(role)
    is_group = spec.nodes_per_instance > 1
    if is_group and spec.parallelism.data > 1:
        raise ConfigError(
            f"{role.value} has nodesPerInstance {spec.nodes_per_instance} and parallelism.data "
            f"{spec.parallelism.data}: an instance over several nodes has one copy of the model, "
            "so set parallelism.data to 1 and raise replicas"
        )
    places = (PodPlace.LEADER, PodPlace.WORKER) if is_group else (PodPlace.ALONE,)
    templates = tuple(engine_template(pool, role, revision, place) for place in places)
    template = template_of({"size": spec.nodes_per_instance, "templates": list(templates)})
    kind = LEADER_WORKER_SET if is_group else DEPLOYMENT
    name = names.workload_name(pool.name, role, revision, template)
    return WorkloadDesign(name, kind, role, revision, template, templates)


def render_workload(pool: Pool, design: WorkloadDesign, replicas: int) -> Document:
    """The workload as an object that asks for ``replicas`` instances."""
    is_group = design.kind == LEADER_WORKER_SET
    spec = _group_spec(pool, design) if is_group else _deployment_spec(pool, design)
    metadata = metadata_of(pool, design.name, design.role.value, design.labels)
    return make_object(design.kind, metadata, spec={"replicas": replicas, **spec})


def _deployment_spec(pool: Pool, design: WorkloadDesign) -> Document:
    selector = engine_selector(pool, design.role, design.revision, design.template)
    return {
        "selector": {"matchLabels": selector},
        "template": _finished(design, 0),
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "minReadySeconds": 0,
        "progressDeadlineSeconds": _START_LIMIT_S,
        "revisionHistoryLimit": 0,
    }


def _group_spec(pool: Pool, design: WorkloadDesign) -> Document:
    return {
        "leaderWorkerTemplate": {
            "size": pool.role(design.role).nodes_per_instance,
            # When one rank has died, the other ranks never recover: vLLM's processes give up.
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": _finished(design, 0),
            "workerTemplate": _finished(design, 1),
        },
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "startupPolicy": "LeaderCreated",
    }


def _finished(design: WorkloadDesign, index: int) -> Document:
    return labelled(design.templates[index], {labels.TEMPLATE: design.template})
