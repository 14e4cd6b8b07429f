"""Makes the command line and environment with which a container starts vLLM for one role.

Source of truth: vLLM 0.32 ``engine/arg_utils.py`` and ``entrypoints/cli/serve.py``; the connector's settings are those
of ``pdcluster_connector/settings.py``. The image must hold vLLM for the role's device, and the package
``pdcluster[connector]`` with the command ``pdcluster`` and the plugin by which vLLM finds the connector.

``$(NAME)`` in an argument is replaced by Kubernetes, from the container's environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from pdcluster_operator.api.model import Model
from pdcluster_operator.api.role import DeviceKind, RoleSpec
from pdcluster_operator.core.manifests import pool_tls
from pdcluster_operator.core.manifests.pool import ENGINE, PORT, Document, Pool, field_env, secret_ref
from pdcluster_protocol.labels import Role
from pdcluster_protocol.launch import MOONCAKE_PORTS, ConnectorSettings, kv_transfer_config
from pdcluster_protocol.params import ContentCheck
from pdcluster_protocol.secret import SECRET_VARIABLE

CACHE_FOLDER: Final = "/cache"
"""Home folder of the engines' user. So it holds every cache: model hub, vLLM, Triton, Ascend's logs."""
MODEL_FOLDER: Final = "/model"
"""Where ``model.volume`` is mounted."""

_ALL_ADDRESSES: Final = "0.0.0.0"  # noqa: S104  # a pod's own network; the NetworkPolicy decides who may come in


class PodPlace(Enum):
    """The place of a pod in its instance."""

    ALONE = auto()
    LEADER = auto()
    WORKER = auto()


_PORTS_BESIDE: Final = (30000, 32767)
"""First and last port of a range above Mooncake's own, and below the ports that Linux gives to outgoing connections."""
_PROGRAM: Final = {
    PodPlace.ALONE: ("python3", "-m", "vllm.entrypoints.openai.api_server"),
    PodPlace.LEADER: ("python3", "-m", "vllm.entrypoints.openai.api_server"),
    # Only `vllm serve` knows ranks without an API server.
    PodPlace.WORKER: ("python3", "-m", "vllm.entrypoints.cli.main", "serve"),
}


def engine_command(pool: Pool, place: PodPlace) -> list[str]:
    """The program, as a container's ``command``."""
    program = list(_PROGRAM[place])
    return program if place is PodPlace.WORKER else pool_tls.mirrored(pool, program)


def engine_argv(pool: Pool, role: Role, place: PodPlace) -> list[str]:
    """The engine's arguments. The user's come last, sorted by name, so no hash depends on their order."""
    spec = pool.role(role)
    return [
        *_model_args(pool.spec.model, place),
        *(["--headless"] if place is PodPlace.WORKER else _http_args(pool)),
        *_split_args(spec),
        *_node_args(spec, place),
        f"--kv-transfer-config={_json(transfer_config(pool, role, place))}",
        *(spelled_arg(name, value) for name, value in sorted(spec.engine_args.items())),
    ]


def _http_args(pool: Pool) -> list[str]:
    return [f"--host={_ALL_ADDRESSES}", f"--port={PORT}", *pool_tls.engine_flags(pool)]


def spelled_arg(name: str, value: str) -> str:
    """The argument as ``api/engine_args.py`` says: ``--name``, ``--no-name`` or ``--name=value``."""
    if value == "true":
        return f"--{name}"
    return f"--no-{name}" if value == "false" else f"--{name}={value}"


def transfer_config(pool: Pool, role: Role, place: PodPlace) -> Document:
    """vLLM's ``KVTransferConfig``. All pods of an instance have one engine id; other instances have others."""
    transfer = pool.spec.transfer
    settings: ConnectorSettings = {
        "transfer_protocol": pool.spec.transfer_protocol.value,
        "quarantine_s": float(transfer.quarantine_seconds),
    }
    if transfer.devices:
        settings["transfer_devices"] = tuple(transfer.devices)
    if role is Role.DECODE:
        settings["side_channel_port"] = transfer.port
        if transfer.min_push_tokens is not None:
            settings["min_push_tokens"] = transfer.min_push_tokens
        settings |= pool_tls.decode_settings(pool)
    if transfer.content_check is not None and (role is Role.DECODE or _compiles_sums(pool, transfer.content_check)):
        settings["content_check"] = transfer.content_check.value
    engine_id = "$(POD_NAME)" if place is PodPlace.ALONE else "$(LWS_LEADER_ADDRESS)"
    return kv_transfer_config(role, engine_id, settings, transfer.on_failure.value)


def _compiles_sums(pool: Pool, check: ContentCheck) -> bool:
    """Whether prefill needs the setting too: on a CPU prefill compiles the loop over all content when it starts."""
    return check is ContentCheck.FULL and pool.role(Role.PREFILL).device.kind is DeviceKind.CPU


def engine_env(pool: Pool, role: Role) -> list[Document]:
    """Our variables, overridden by the user's. The API server refuses a user's variable with the secret's name."""
    ours = [
        field_env("POD_IP", "status.podIP"),
        field_env("POD_NAME", "metadata.name"),
        field_env("VLLM_HOST_IP", "status.podIP"),
        {"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": secret_ref(pool)}},
        {"name": "HOME", "value": CACHE_FOLDER},
        # The image may have no entry for our user in /etc/passwd, and PyTorch's compiler asks for the user's name.
        {"name": "USER", "value": "pdcluster"},
        {"name": "VLLM_NO_USAGE_STATS", "value": "1"},
        *_device_env(pool.role(role)),
        *(_port_env(pool) if role is Role.DECODE else ()),
    ]
    given = [variable.to_wire() for variable in pool.role(role).env]
    return list({variable["name"]: variable for variable in (*ours, *given)}.values())


def _model_args(model: Model, place: PodPlace) -> list[str]:
    """The model and its names. A worker's ``vllm serve`` wants the model first and without ``--model``."""
    source = _model_source(model)
    args = [source if place is PodPlace.WORKER else f"--model={source}", f"--served-model-name={model.public_name}"]
    return [*args, f"--revision={model.revision}"] if model.revision else args


def _model_source(model: Model) -> str:
    if model.volume is not None:
        return f"{MODEL_FOLDER}/{model.volume.path.strip('/')}".rstrip("/")
    return model.path or model.name or ""


def _split_args(spec: RoleSpec) -> list[str]:
    split = spec.parallelism
    sizes = {"tensor": split.tensor, "pipeline": split.pipeline, "data": split.data}
    return [f"--{name}-parallel-size={size}" for name, size in sizes.items() if size > 1]


def _node_args(spec: RoleSpec, place: PodPlace) -> list[str]:
    if place is PodPlace.ALONE:
        return []
    rank = "0" if place is PodPlace.LEADER else "$(LWS_WORKER_INDEX)"
    nodes = [f"--nnodes={spec.nodes_per_instance}", f"--node-rank={rank}"]
    return ["--distributed-executor-backend=mp", *nodes, "--master-addr=$(LWS_LEADER_ADDRESS)"]


def _device_env(spec: RoleSpec) -> list[Document]:
    if spec.device.kind is not DeviceKind.CPU:
        return []
    # Otherwise vLLM in every pod of a node would bind its threads to the same first cores.
    unbound = [{"name": "VLLM_CPU_OMP_THREADS_BIND", "value": "nobind"}]
    if spec.ranks > 1:
        return unbound
    limit = {"containerName": ENGINE, "resource": "limits.cpu", "divisor": "1"}
    return [*unbound, {"name": "OMP_NUM_THREADS", "valueFrom": {"resourceFieldRef": limit}}]


def mooncake_ports(port: int, num_ranks: int) -> tuple[int, int] | None:
    """First and last port that Mooncake may draw, if side channels take ``num_ranks`` ports from ``port`` on.

    None: the side channels are not in Mooncake's own range, so that range stays. Example: 8 ranks take 20100 to 20107.
    Of the two parts that are left, 20108 to 29999 is larger.
    """
    first, last = MOONCAKE_PORTS
    if port + num_ranks <= first or port > last:
        return None
    below, above = (first, port - 1), (port + num_ranks, last)
    larger = max(below, above, key=lambda piece: piece[1] - piece[0])
    return larger if larger[0] <= larger[1] else _PORTS_BESIDE


def _port_env(pool: Pool) -> list[Document]:
    """Mooncake's range of ports. Mooncake begins to listen first, and would sometimes take a side channel's port."""
    drawn = mooncake_ports(pool.spec.transfer.port, pool.role(Role.DECODE).ranks)
    names = ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT")
    return [{"name": name, "value": str(port)} for name, port in zip(names, drawn or (), strict=False)]


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
