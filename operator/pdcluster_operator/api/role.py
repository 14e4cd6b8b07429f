"""One role of a pool: how many engines, on what devices, split how, started with what."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final

from pydantic import Field

from pdcluster_operator.api.base import (
    MAX_NAME,
    MAX_REPLICAS,
    ApiModel,
    Fault,
    OpenObject,
    Quantity,
    Rule,
    checked_by,
    map_by,
)
from pdcluster_operator.api.engine_args import (
    ARGS_RULES,
    MAX_ARG_CHARACTERS,
    MAX_ARGS,
    MUST_AGREE,
    ON_ONE_NODE,
    agreement_rule,
)
from pdcluster_protocol.secret import SECRET_VARIABLE

MAX_ENV: Final = 64


class DeviceKind(Enum):
    """Where engines compute."""

    ASCEND = "ascend"
    CUDA = "cuda"
    CPU = "cpu"


class Parallelism(ApiModel):
    """How one instance splits the model. The two roles may differ: any TP pushes to any TP."""

    tensor: int = Field(default=1, ge=1, le=256)
    """Ranks that split each layer, in [1, 256]. Default 1: fits every model that fits one device."""
    pipeline: int = Field(default=1, ge=1, le=64)
    """Stages that split the layers among them, in [1, 64]. Default 1: no stage waits for another."""
    data: int = Field(default=1, ge=1, le=256)
    """Copies within one instance, in [1, 256]. Default 1: replicas are simpler, unless experts are split over
    them."""


class RoleDevice(ApiModel):
    """The device on which each rank computes."""

    kind: DeviceKind
    """ascend, cuda or cpu. No default: none is right for most. Cannot change, for KV of one kind means nothing on
    another, so a rollout could not pair old and new engines."""
    resource_name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME)
    """Extended resource that a pod asks for. Default: nvidia.com/gpu on cuda, huawei.com/Ascend910 on ascend. Not for
    cpu."""
    count: int | None = Field(default=None, ge=1, le=1024)
    """Devices of each pod, in [1, 1024]. Default: tensor x pipeline x data / nodesPerInstance, which it must be. Not
    for cpu."""

    rules = (
        Rule(
            holds="self.kind != 'cpu' || !has(self.count)",
            says="device.kind is cpu and count is %s: leave count out, and ask for cores in resources",
            values=("string(self.count)",),
            short="device.kind is cpu: leave count out, and ask for cores in resources",
            path=".count",
            fault=Fault.FORBIDDEN,
        ),
        Rule(
            holds="self.kind != 'cpu' || !has(self.resourceName)",
            says="device.kind is cpu and resourceName is %s: leave resourceName out, and ask for cores in resources",
            values=("self.resourceName",),
            short="device.kind is cpu: leave resourceName out, and ask for cores in resources",
            path=".resourceName",
            fault=Fault.FORBIDDEN,
        ),
        Rule(
            holds="self.kind == oldSelf.kind",
            says="device.kind cannot change from %s to %s: old and new engines could not hand over KV, "
            "so make another PDCluster and move the clients to it",
            values=("oldSelf.kind", "self.kind"),
            short="device.kind cannot change: make another PDCluster and move the clients to it",
            path=".kind",
        ),
    )


class Resources(ApiModel):
    """A container's resources beside its devices, as in a pod."""

    requests: dict[str, Quantity] = Field(default={}, max_length=32)
    """The amounts that the scheduler keeps free, by resource; at most 32. Default: of cpu and memory, where they have
    no limit either, a little for each rank or router, so that no pod is BestEffort; of others nothing."""
    limits: dict[str, Quantity] = Field(default={}, max_length=32)
    """The limits, by resource; at most 32. Default: none, so that no engine is killed for a guess."""


class EnvVar(ApiModel):
    """One environment variable of the engines, as in a pod."""

    name: str = Field(min_length=1, max_length=256, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")
    """Name of the variable."""
    value: str | None = Field(default=None, max_length=32768)
    """Its value. Either this or valueFrom. Default: the empty text, when both are left out."""
    value_from: OpenObject | None = None
    """Where it comes from: a pod's EnvVarSource (secretKeyRef, configMapKeyRef, fieldRef, resourceFieldRef). Default:
    nowhere."""

    rules = (
        Rule(
            holds="!(has(self.value) && has(self.valueFrom))",
            says="env %s has both value and valueFrom: give one of them",
            values=("self.name",),
            short="an env variable has both value and valueFrom: give one of them",
        ),
        Rule(
            holds=f"self.name != '{SECRET_VARIABLE}'",
            says=f"env {SECRET_VARIABLE} is set by the operator: name your own secret in auth.secretRef",
            short=f"env {SECRET_VARIABLE} is set by the operator: name your own secret in auth.secretRef",
            fault=Fault.FORBIDDEN,
        ),
    )


EngineArgs = Annotated[
    # An option without a value would be taken for one that is left out.
    dict[str, Annotated[str, Field(min_length=1, max_length=MAX_ARG_CHARACTERS)]],
    Field(max_length=MAX_ARGS, json_schema_extra=checked_by(ARGS_RULES)),
]


def ranks_of(role: str) -> str:
    """A CEL expression: how many ranks one instance has."""
    split = f"{role}.parallelism"
    return f"{split}.tensor * {split}.pipeline * {split}.data"


_RANKS: Final = ranks_of("self")
_SPLIT: Final = "tensor %s x pipeline %s x data %s is %s ranks"
_SPLIT_VALUES: Final = (
    "string(self.parallelism.tensor)",
    "string(self.parallelism.pipeline)",
    "string(self.parallelism.data)",
    f"string({_RANKS})",
)


class RoleSpec(ApiModel):
    """All engines of one role. Engines of one role are alike."""

    replicas: int = Field(default=1, ge=0, le=MAX_REPLICAS)
    """Instances, in [0, 1000]. Default 1. With scaling.mode External only what the role starts with. Both roles have
    some, or both have none: then the pool is stopped and keeps its address."""
    parallelism: Parallelism = Parallelism()
    """How one instance splits the model."""
    nodes_per_instance: int = Field(default=1, ge=1, le=64)
    """Nodes that one instance is spread over, in [1, 64]. Default 1. More needs LeaderWorkerSet in the cluster."""
    device: RoleDevice
    """The device on which each rank computes."""
    resources: Resources = Resources()
    """Resources of the engine's container beside its devices. Where neither a request nor a limit is given, 2 cpu and
    8Gi memory are requested for each rank of a pod, on cpu 250m and 1Gi."""
    engine_args: EngineArgs = Field(default={})
    """vLLM's options by name without dashes, values in quotes, at most 64 of 1 to 4096 characters: block-size: "32".
    "true" gives --name, "false" gives --no-name, anything else --name=value; structures are JSON. Options that decide
    what KV looks like must be alike in both roles. Default: vLLM's own choices."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=MAX_ENV), map_by("name")] = ()
    """Environment of the engines, at most 64. Default: none beside the operator's own."""
    pod_overrides: OpenObject | None = None
    """Part of a pod template (metadata, spec), merged over the operator's as kubectl does; containers merge by name,
    the engine's is called engine. For tolerations, volumes, node selectors, image pull secrets. Default: none."""

    rules = (
        Rule(
            holds=f"({_RANKS}) % self.nodesPerInstance == 0",
            says=f"{_SPLIT}, which nodesPerInstance %s does not divide: choose a nodesPerInstance that does",
            values=(*_SPLIT_VALUES, "string(self.nodesPerInstance)"),
            short="nodesPerInstance does not divide tensor x pipeline x data: choose one that does",
            path=".nodesPerInstance",
        ),
        Rule(
            holds="self.nodesPerInstance == 1 || self.parallelism.data == 1",
            says="nodesPerInstance is %s and parallelism.data %s: an instance over several nodes has one copy of the "
            "model, so set parallelism.data to 1 and raise replicas",
            values=("string(self.nodesPerInstance)", "string(self.parallelism.data)"),
            short="an instance over several nodes has one copy of the model: set parallelism.data to 1, raise replicas",
            path=".parallelism.data",
        ),
        Rule(
            holds=f"self.nodesPerInstance == 1 || !('{ON_ONE_NODE}' in self.engineArgs)",
            says=f"engineArgs has {ON_ONE_NODE} = %s and nodesPerInstance is %s: leave it out, over nodes it is mp",
            values=(f"self.engineArgs['{ON_ONE_NODE}']", "string(self.nodesPerInstance)"),
            short=f"engineArgs has {ON_ONE_NODE} over several nodes: leave it out, it is mp",
            path=".engineArgs",
            fault=Fault.FORBIDDEN,
        ),
        Rule(
            holds=f"!has(self.device.count) || self.device.count * self.nodesPerInstance == {_RANKS}",
            says=f"device.count %s on nodesPerInstance %s makes %s devices, {_SPLIT}: "
            "make them equal, or leave device.count out",
            values=(
                "string(self.device.count)",
                "string(self.nodesPerInstance)",
                "string(self.device.count * self.nodesPerInstance)",
                *_SPLIT_VALUES,
            ),
            short="devices do not match parallelism: leave device.count out",
            path=".device.count",
        ),
    )

    @property
    def ranks(self) -> int:
        """Ranks of one instance: tensor 4 x pipeline 2 x data 1 is 8."""
        return self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data

    @property
    def devices_per_pod(self) -> int:
        """Devices that each pod asks for; 0 on cpu."""
        if self.device.kind is DeviceKind.CPU:
            return 0
        return self.device.count or self.ranks // self.nodes_per_instance


class Roles(ApiModel):
    """Both roles, by name, so that rules can compare them."""

    prefill: RoleSpec
    """Engines that compute prompts."""
    decode: RoleSpec
    """Engines that generate tokens."""

    rules = (
        Rule(
            holds="(self.prefill.replicas == 0) == (self.decode.replicas == 0)",
            says="prefill has %s replicas, decode has %s: neither serves alone, so give both some, or both 0 to stop "
            "the pool",
            values=("string(self.prefill.replicas)", "string(self.decode.replicas)"),
            short="one role has replicas and the other has none: give both some, or both 0 to stop the pool",
        ),
        Rule(
            holds="self.prefill.device.kind == self.decode.device.kind",
            says="prefill has device.kind %s, decode has %s: "
            "KV of one means nothing on the other, so give both the same",
            values=("self.prefill.device.kind", "self.decode.device.kind"),
            short="prefill and decode differ in device.kind: give both the same",
            path=".decode.device.kind",
        ),
        *map(agreement_rule, MUST_AGREE),
    )
