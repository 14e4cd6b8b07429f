"""The pod template of one role's engines. Every field of it counts for the template's hash.

If a release changes this template, an upgrade of the operator restarts every engine of every pool. So such a change
needs a line in CHANGELOG. Settings that only routers or the planner need are not in the template.
"""

from __future__ import annotations

from typing import Final

from pdcluster_operator.api.role import DeviceKind, RoleSpec
from pdcluster_operator.core import names
from pdcluster_operator.core.manifests import pool_tls
from pdcluster_operator.core.manifests.command import (
    CACHE_FOLDER,
    MODEL_FOLDER,
    PodPlace,
    engine_argv,
    engine_command,
    engine_env,
)
from pdcluster_operator.core.manifests.pool import (
    ENGINE,
    HTTP,
    LAST_WORDS,
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
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role
from pdcluster_protocol.launch import ENGINE_KEY_VARIABLE, TransferProtocol

MAX_PORTS: Final = 64
"""The most side channels that a pod lists: no node has more devices. The list is for people, and for the scheduler if
a pod is on its node's own network."""
ASCEND_GROUP: Final = 1000
"""HwHiAiUser, to whom Ascend's driver gives its devices and libraries on every node."""
_ON_DEVICES: Final = (2000, 8)
"""Millicores and GiB that a rank on a device requests, if the user gives nothing. A rank's process keeps one core busy;
the API server, the tokenizer and the senders share the second core. Driver, PyTorch and buffers take 5 to 8 GiB."""
_ON_CORES: Final = (250, 1)
"""The same for a rank on CPUs: little, so that a test fits any node. Real work needs requests of the user's own."""
_DEVICES: Final = {DeviceKind.CUDA: "nvidia.com/gpu", DeviceKind.ASCEND: "huawei.com/Ascend910"}


def engine_template(pool: Pool, role: Role, revision: str, place: PodPlace = PodPlace.ALONE) -> Document:
    """The pod template, with the user's overrides, before its hash becomes one of its labels.

    Raises:
        ConfigError: The overrides cannot be merged, or give the engine a key that routers do not have.
    """
    ours = {"metadata": {"labels": _engine_labels(pool, role, revision, place)}, "spec": _pod_spec(pool, role, place)}
    merged = merge_template(ours, pool.role(role).pod_overrides)
    if _engines_key(merged) != _engines_key(ours):
        raise ConfigError(
            f"roles.{role.value}.podOverrides changes env {ENGINE_KEY_VARIABLE} of the engine, which routers do not "
            "see: put it in roles.prefill.env and roles.decode.env, which routers read too"
        )
    # Selectors match our labels, so overrides must not change these labels.
    return labelled(merged, ours["metadata"]["labels"])


def _engines_key(template: Document) -> list[Document]:
    """The entries of the engine's container for vLLM's own key, ``ENGINE_KEY_VARIABLE``."""
    engines = (one for one in _items(template.get("spec"), "containers") if one.get("name") == ENGINE)
    return [entry for engine in engines for entry in _items(engine, "env") if entry.get("name") == ENGINE_KEY_VARIABLE]


def _items(part: object, name: str) -> list[Document]:
    """The maps in the list of this name. If overrides put something else there, the API server refuses the template."""
    found = part.get(name) if isinstance(part, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _engine_labels(pool: Pool, role: Role, revision: str, place: PodPlace) -> dict[str, str]:
    leads = {} if place is PodPlace.WORKER else {labels.LEADER: "true"}
    return {**common_labels(pool, role.value), **role_labels(role, revision), **leads}


def _pod_spec(pool: Pool, role: Role, place: PodPlace) -> Document:
    spec = pool.role(role)
    return {
        "serviceAccountName": names.child_name(pool.name, ENGINE),
        "automountServiceAccountToken": False,
        # A Service called vllm would set VLLM_PORT in every pod, and vLLM would take it for its own.
        "enableServiceLinks": False,
        "securityContext": _security(pool, spec),
        "terminationGracePeriodSeconds": grace_s(pool.spec.drain.timeout_seconds),
        "containers": [_container(pool, role, place)],
        "volumes": _volumes(pool, place),
    }


def _container(pool: Pool, role: Role, place: PodPlace) -> Document:
    spec = pool.role(role)
    # A worker has no HTTP server: the leader's probes are those of the whole instance.
    probes = {} if place is PodPlace.WORKER else engine_probes(pool, role)
    return {
        "name": ENGINE,
        "image": pool.spec.image,
        "command": engine_command(pool, place),
        "args": engine_argv(pool, role, place),
        "env": engine_env(pool, role),
        "ports": _ports(pool, role, place),
        "resources": _resources(spec),
        "securityContext": container_security(locks_memory=_locks_memory(pool)),
        "volumeMounts": _mounts(pool, place),
        **LAST_WORDS,
        **probes,
        "lifecycle": drain_hook(pool, place),
    }


def _security(pool: Pool, spec: RoleSpec) -> Document:
    groups = {"supplementalGroups": [ASCEND_GROUP]} if spec.device.kind is DeviceKind.ASCEND else {}
    return {**pod_security(locks_memory=_locks_memory(pool)), **groups}


def _locks_memory(pool: Pool) -> bool:
    return pool.spec.transfer_protocol is TransferProtocol.RDMA


def _ports(pool: Pool, role: Role, place: PodPlace) -> list[Document]:
    """Ports for HTTP and side channels: decode rank r listens on the side channel's port + r."""
    http = [] if place is PodPlace.WORKER else [{"name": HTTP, "containerPort": PORT, "protocol": "TCP"}]
    num_ranks = min(pool.role(role).ranks, MAX_PORTS) if role is Role.DECODE else 0
    first = pool.spec.transfer.port
    channels = [
        {"name": f"channel-{rank}", "containerPort": first + rank, "protocol": "TCP"} for rank in range(num_ranks)
    ]
    return [*http, *channels]


def _resources(spec: RoleSpec) -> Document:
    """The user's resources, and the devices as a limit, which is a request too (Kubernetes, extended resources)."""
    given = resources_of(spec.resources, _requests(spec))
    if not spec.devices_per_pod:
        return given
    name = spec.device.resource_name or _DEVICES[spec.device.kind]
    return {**given, "limits": {**given.get("limits", {}), name: str(spec.devices_per_pod)}}


def _requests(spec: RoleSpec) -> dict[str, str]:
    """Requests of one pod. Example: 4 ranks on GPUs request 8 cores and 32 GiB."""
    millicores, gib = _ON_CORES if spec.device.kind is DeviceKind.CPU else _ON_DEVICES
    ranks = spec.ranks // spec.nodes_per_instance
    whole, rest = divmod(millicores * ranks, 1000)
    return {"cpu": f"{millicores * ranks}m" if rest else str(whole), "memory": f"{gib * ranks}Gi"}


def _volumes(pool: Pool, place: PodPlace) -> list[Document]:
    volume = pool.spec.model.volume
    return [
        scratch_volume("tmp"),
        scratch_volume("cache"),
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        *([{"name": "model", **volume.source}] if volume else []),
        *(pool_tls.secret_volumes if place is PodPlace.WORKER else pool_tls.engine_volumes)(pool),
    ]


def _mounts(pool: Pool, place: PodPlace) -> list[Document]:
    model = [{"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True}] if pool.spec.model.volume else []
    return [
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # a folder in the container
        {"name": "cache", "mountPath": CACHE_FOLDER},
        # Workers of one engine exchange tensors here; a container's own /dev/shm has 64 MiB.
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        *model,
        *(pool_tls.secret_mounts if place is PodPlace.WORKER else pool_tls.engine_mounts)(pool),
    ]
