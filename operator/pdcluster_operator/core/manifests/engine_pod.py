"""The pod template of one role's engines: what the template's hash is taken of.

Whatever is added here restarts every engine of every pool when the operator is upgraded: such a change has a line in
CHANGELOG. What only the routers or the planner need is no part of it.
"""

from __future__ import annotations

from typing import Final

from pdcluster_operator.api.role import DeviceKind
from pdcluster_operator.api.role import Role as RoleSpec
from pdcluster_operator.core import names
from pdcluster_operator.core.manifests.command import (
    CACHE_FOLDER,
    MODEL_FOLDER,
    Place,
    engine_argv,
    engine_command,
    engine_env,
)
from pdcluster_operator.core.manifests.pool import (
    ENGINE,
    HTTP,
    PORT,
    Document,
    Pool,
    common_labels,
    container_security,
    labelled,
    pod_security,
    resources_of,
    role_labels,
    scratch_volume,
)
from pdcluster_operator.core.manifests.probes import drain_hook, engine_probes, grace_s
from pdcluster_operator.core.manifests.strategic_merge import merge_template
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role

MAX_PORTS: Final = 64
"""Side channels that are listed. Lists of ports are for people, and for the scheduler when a pod is on its node's own
network; more of them than one node has devices would only be noise."""
ASCEND_GROUP: Final = 1000
"""HwHiAiUser, to whom Ascend's driver gives its devices and libraries on every node."""
_DEVICES: Final = {DeviceKind.CUDA: "nvidia.com/gpu", DeviceKind.ASCEND: "huawei.com/Ascend910"}


def engine_template(pool: Pool, role: Role, revision: str, place: Place = Place.ALONE) -> Document:
    """The pod template, with the user's overrides, before its hash is a label of it.

    Raises:
        ConfigError: The overrides cannot be merged.
    """
    ours = {"metadata": {"labels": _engine_labels(pool, role, revision, place)}, "spec": _pod_spec(pool, role, place)}
    merged = merge_template(ours, pool.role(role).pod_overrides)
    # Selectors stand on ours, so they are nobody else's to change.
    return labelled(merged, ours["metadata"]["labels"])


def _engine_labels(pool: Pool, role: Role, revision: str, place: Place) -> dict[str, str]:
    leads = {} if place is Place.WORKER else {labels.LEADER: "true"}
    return {**common_labels(pool, role.value), **role_labels(role, revision), **leads}


def _pod_spec(pool: Pool, role: Role, place: Place) -> Document:
    spec = pool.role(role)
    return {
        "serviceAccountName": names.child_name(pool.name, ENGINE),
        "automountServiceAccountToken": False,
        # A Service called vllm would set VLLM_PORT in every pod, and vLLM would take it for its own.
        "enableServiceLinks": False,
        "securityContext": _security(spec),
        "terminationGracePeriodSeconds": grace_s(pool.spec.drain.timeout_seconds),
        "containers": [_container(pool, role, place)],
        "volumes": _volumes(pool),
    }


def _container(pool: Pool, role: Role, place: Place) -> Document:
    spec = pool.role(role)
    # A worker has no API server to ask: the leader's probes are those of the whole instance.
    probes = {} if place is Place.WORKER else engine_probes(pool, role)
    return {
        "name": ENGINE,
        "image": pool.spec.image,
        "command": engine_command(place),
        "args": engine_argv(pool, role, place),
        "env": engine_env(pool, role),
        "ports": _ports(pool, role, place),
        "resources": _resources(spec),
        "securityContext": container_security(),
        "volumeMounts": _mounts(pool),
        **probes,
        "lifecycle": drain_hook(pool.spec.drain.timeout_seconds, place),
    }


def _security(spec: RoleSpec) -> Document:
    groups = {"supplementalGroups": [ASCEND_GROUP]} if spec.device.kind is DeviceKind.ASCEND else {}
    return {**pod_security(), **groups}


def _ports(pool: Pool, role: Role, place: Place) -> list[Document]:
    """Decode rank r listens on the side channel's port + r."""
    http = [] if place is Place.WORKER else [{"name": HTTP, "containerPort": PORT, "protocol": "TCP"}]
    num_ranks = min(pool.role(role).ranks, MAX_PORTS) if role is Role.DECODE else 0
    first = pool.spec.transfer.port
    channels = [
        {"name": f"channel-{rank}", "containerPort": first + rank, "protocol": "TCP"} for rank in range(num_ranks)
    ]
    return [*http, *channels]


def _resources(spec: RoleSpec) -> Document:
    """What the user gives, and the devices: as a limit, which is a request too (Kubernetes, extended resources)."""
    given = resources_of(spec.resources)
    if not spec.devices_per_pod:
        return given
    name = spec.device.resource_name or _DEVICES[spec.device.kind]
    return {**given, "limits": {**given.get("limits", {}), name: str(spec.devices_per_pod)}}


def _volumes(pool: Pool) -> list[Document]:
    volume = pool.spec.model.volume
    return [
        scratch_volume("tmp"),
        scratch_volume("cache"),
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        *([{"name": "model", **volume.source}] if volume else []),
    ]


def _mounts(pool: Pool) -> list[Document]:
    model = [{"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True}] if pool.spec.model.volume else []
    return [
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # a folder in the container
        {"name": "cache", "mountPath": CACHE_FOLDER},
        # Workers of one engine hand each other tensors here; a container's own has 64 MiB.
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        *model,
    ]
