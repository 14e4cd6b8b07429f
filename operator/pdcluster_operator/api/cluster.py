"""PDCluster: one model served by prefill and decode engines and the routers in front of them.

Each field says its unit, bounds and default, and why that default. These models are the source of the CRD
(``tools/crd.py``): what they refuse by type and bounds, and what the rules refuse, the API server refuses.

A field cannot change where a rollout could not bring the change about: a name that clients ask for (a request in the
middle of a rollout would meet an engine without it), the kind of device (old and new engines could not hand over KV),
the pool's secret (routers hold one secret, so they could not reach the engines of the other revision), and whether the
pool has TLS inside (routers speak one way with all engines).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, Literal

from pydantic import Field

from pdcluster_operator.api.base import (
    DAY_S,
    MAX_LABEL,
    MAX_NAME,
    MAX_REPLICAS,
    ApiModel,
    CountOrPercent,
    Name,
    Rule,
    text_problem,
)
from pdcluster_operator.api.model import Model, name_in
from pdcluster_operator.api.role import DeviceKind, Roles, ranks_of
from pdcluster_operator.api.router import RouterSpec
from pdcluster_operator.api.status import PDClusterStatus
from pdcluster_operator.api.transfer import Transfer
from pdcluster_protocol.launch import HTTP_PORT, TransferProtocol


class Rollout(ApiModel):
    """How engines are replaced. Both roles move in proportion, and pairs exist only within one revision."""

    max_surge: CountOrPercent = 1
    """Instances of a role above the wanted number, or a part like 25% (rounded up). Default 1: capacity does not fall
    while engines are replaced. Without spare devices give 0, and maxUnavailable 1."""
    max_unavailable: CountOrPercent = 0
    """Instances of a role that may be missing, or a part like 25% (rounded down). Default 0: see maxSurge."""
    progress_deadline_seconds: int = Field(default=1800, ge=10, le=DAY_S)
    """Seconds without progress after which the rollout stops and says so, in [10, 86400]. Default 1800: large weights
    take minutes to load, and kernels to compile."""
    paused: bool = False
    """No engine is replaced while this is true; running engines go on serving. While a rollout is under way replicas
    and autoscalers wait too. Where nothing is to be replaced they act as ever, and 0 of both roles stops the pool,
    unless the spec is refused. Default false."""

    rules = (
        Rule(
            holds="!(string(self.maxSurge) in ['0', '0%'] && string(self.maxUnavailable) in ['0', '0%'])",
            says="maxSurge is %s and maxUnavailable is %s: nothing could ever move, so give one of them 1 or more",
            values=("string(self.maxSurge)", "string(self.maxUnavailable)"),
            short="maxSurge and maxUnavailable are both 0: nothing could ever move, so give one of them 1 or more",
        ),
    )


class ScalingMode(Enum):
    """The numbers of replicas that count: the roles' own, or those of their PDRoleScalers."""

    FIXED = "Fixed"
    EXTERNAL = "External"


class Ratio(ApiModel):
    """Bounds of prefill replicas divided by decode replicas."""

    min: float = Field(gt=0, le=MAX_REPLICAS)
    """Least prefill replicas for each decode replica, above 0. No default: it depends on prompts and answers."""
    max: float = Field(gt=0, le=MAX_REPLICAS)
    """Most prefill replicas for each decode replica, up to 1000."""

    rules = (
        Rule(
            holds="self.min <= self.max",
            says="scaling.ratio.min %s is above max %s: exchange them",
            values=("string(self.min)", "string(self.max)"),
            short="scaling.ratio.min is above max: exchange them",
        ),
    )


class Scaling(ApiModel):
    """The number of replicas: fixed, or an autoscaler's."""

    mode: ScalingMode = ScalingMode.FIXED
    """Fixed: roles.*.replicas. External: the PDRoleScalers, which HPA and KEDA can move. Default Fixed."""
    ratio: Ratio | None = None
    """Bounds of prefill to decode replicas; outside, the role that lacks is raised. Default: none."""


class DrainSpec(ApiModel):
    """How an engine is stopped."""

    timeout_seconds: int = Field(default=600, ge=0, le=DAY_S)
    """Seconds that an engine which is to go may still work on what it has, in [0, 86400]. Default 600: longer
    than nearly all answers take; one that takes longer is cut."""


_LABEL: Final = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DNS_NAME: Final = rf"^{_LABEL}(\.{_LABEL})*$"
"""As the router's flag takes it."""


class SecretRef(ApiModel):
    """A key of a Secret in the same namespace."""

    name: Name
    """Name of the Secret."""
    key: str = Field(default="secret", min_length=1, max_length=MAX_NAME, pattern=r"^[-._a-zA-Z0-9]+$")
    """Key in it, with 32 bytes of text or more. Default secret: the key of those that the operator makes."""


def _secret_in(auth: str, otherwise: str) -> str:
    """A CEL expression: ``name/key``, or what stands for the operator's own."""
    secret = f"{auth}.secretRef"
    return f"has({secret}) ? {secret}.name + '/' + {secret}.key : '{otherwise}'"


class Auth(ApiModel):
    """How router and engines of this pool know each other."""

    secret_ref: SecretRef | None = None
    """Your own secret. Default: the operator makes one. Cannot change, for routers hold one secret, and in a rollout
    could not reach the engines that have the other."""

    rules = (
        Rule(
            holds="has(self.secretRef) == has(oldSelf.secretRef) && (!has(self.secretRef) || "
            "(self.secretRef.name == oldSelf.secretRef.name && self.secretRef.key == oldSelf.secretRef.key))",
            says="auth.secretRef cannot change from %s to %s: make another PDCluster and move the clients to it",
            values=(_secret_in("oldSelf", "the made one"), _secret_in("self", "a made one")),
            short="auth.secretRef cannot change: make another PDCluster and move the clients to it",
            path=".secretRef",
        ),
    )


class PoolTls(ApiModel):
    """TLS between routers and engines, and from the operator to routers."""

    secret_name: Name
    """Name of a Secret in the same namespace, as cert-manager makes it: a certificate under tls.crt, its key under
    tls.key, and under ca.crt the authorities that routers and engines trust. The certificate is for servers and
    clients, and engines answer all that have one of these authorities. Renewals are taken without a restart."""
    server_name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME, pattern=_DNS_NAME)
    """The DNS name that the certificate has. Default: that of the routers' internal Service, which is
    NAME-router-internal.NAMESPACE.svc if the PDCluster's name has at most 36 characters. Pods are called by addresses,
    which no certificate names."""


def _tls_in(spec: str) -> str:
    """A CEL expression: the Secret, and the name if it is given, or what stands for neither."""
    tls = f"{spec}.tls"
    name = f"(has({tls}.serverName) ? ' and serverName ' + {tls}.serverName : '')"
    return f"(has({tls}) ? 'secretName ' + {tls}.secretName + {name} : 'none')"


_NEARLY: Final = "1e-9"
"""Of an instance: 0.07 x 100 is a little above 7 in doubles, and what users wrote is exact (``rollout/scaling.py``)."""
_PREFILL: Final = "double(self.roles.prefill.replicas)"
_DECODE: Final = "double(self.roles.decode.replicas)"
_BELOW: Final = f"{_PREFILL} < self.scaling.ratio.min * {_DECODE} - {_NEARLY}"
_ABOVE: Final = f"{_PREFILL} > self.scaling.ratio.max * {_DECODE} + {_NEARLY}"

_DECODE_RANKS: Final = ranks_of("self.roles.decode")
_ALIASES: Final = "self.router.modelAliases"
_LAST_PORT: Final = f"self.transfer.port + {_DECODE_RANKS} - 1"


class PDClusterSpec(ApiModel):
    """The desired state."""

    model: Model
    """The model, and its name for clients."""
    image: str = Field(min_length=1, max_length=512)
    """Image of the engines: vLLM for the device, and the connector. No default: it goes with the device."""
    roles: Roles
    """Prefill and decode engines."""
    transfer: Transfer = Transfer()
    """How KV gets from prefill to decode."""
    router: RouterSpec = RouterSpec()
    """The routers in front of the engines."""
    rollout: Rollout = Rollout()
    """How engines are replaced."""
    scaling: Scaling = Scaling()
    """The number of replicas: fixed, or an autoscaler's."""
    drain: DrainSpec = DrainSpec()
    """How an engine is stopped."""
    auth: Auth = Auth()
    """How router and engines know each other."""
    tls: PoolTls | None = None
    """TLS inside the pool. Default: none; then prompts and answers between routers and engines are not encrypted.
    Cannot change, for routers speak one way with all engines, and in a rollout could not reach those of the other."""

    rules = (
        Rule(
            holds=f"{_tls_in('self')} == {_tls_in('oldSelf')}",
            says="tls cannot change from %s to %s: routers speak one way with all engines, so make another PDCluster "
            "and move the clients to it",
            values=(_tls_in("oldSelf"), _tls_in("self")),
            short="tls cannot change: make another PDCluster and move the clients to it",
            path=".tls",
        ),
        Rule(
            holds=f"!has({_ALIASES}) || !{_ALIASES}.exists(one, one.name == ({name_in('self.model')}))",
            says="router.modelAliases names %s, and the model is called so: leave it out",
            values=(name_in("self.model"),),
            short="router.modelAliases names the model's own name: leave it out",
            path=".router.modelAliases",
        ),
        Rule(
            holds=f"!has(self.transfer.protocol) || self.transfer.protocol != '{TransferProtocol.ASCEND}' || "
            "self.roles.prefill.device.kind == 'ascend'",
            says="transfer.protocol is ascend and device.kind is %s: use tcp or rdma, or leave protocol out",
            values=("self.roles.prefill.device.kind",),
            short="transfer.protocol ascend needs device.kind ascend: leave protocol out",
            path=".transfer.protocol",
        ),
        Rule(
            holds="!has(self.transfer.devices) || (has(self.transfer.protocol) "
            f"&& self.transfer.protocol == '{TransferProtocol.RDMA}')",
            says="transfer.devices names RDMA devices and transfer.protocol is %s: set protocol rdma, or leave devices "
            "out",
            values=("has(self.transfer.protocol) ? self.transfer.protocol : 'not set'",),
            short="transfer.devices needs transfer.protocol rdma: set it, or leave devices out",
            path=".transfer.devices",
        ),
        Rule(
            holds=f"self.transfer.port > {HTTP_PORT} || {_LAST_PORT} < {HTTP_PORT}",
            says="decode listens on ports %s to %s (transfer.port %s, %s ranks), and on "
            f"{HTTP_PORT} engines answer: leave transfer.port out, or take one above {HTTP_PORT}",
            values=(
                "string(self.transfer.port)",
                f"string({_LAST_PORT})",
                "string(self.transfer.port)",
                f"string({_DECODE_RANKS})",
            ),
            short=f"decode listens on port {HTTP_PORT}, where engines answer: take a transfer.port above it",
            path=".transfer.port",
        ),
        Rule(
            holds=f"!has(self.scaling.ratio) || self.scaling.mode != 'Fixed' || !({_BELOW} || {_ABOVE})",
            says="prefill %s to decode %s replicas is outside scaling.ratio %s to %s: change the replicas or the ratio",
            values=(
                "string(self.roles.prefill.replicas)",
                "string(self.roles.decode.replicas)",
                "string(self.scaling.ratio.min)",
                "string(self.scaling.ratio.max)",
            ),
            short="the replicas are outside scaling.ratio: change the replicas or the ratio",
            path=".scaling.ratio",
        ),
    )

    @property
    def transfer_protocol(self) -> TransferProtocol:
        """The protocol that was asked for, else the one that fits the device."""
        if self.transfer.protocol is not None:
            return self.transfer.protocol
        is_ascend = self.roles.prefill.device.kind is DeviceKind.ASCEND
        return TransferProtocol.ASCEND if is_ascend else TransferProtocol.TCP


_DNS_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""RFC 1123, as Kubernetes has it for a namespace."""
_CLUSTER_NAME: Final = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
_NAME_RULE: Final = Rule(
    holds=f"self.metadata.name.size() <= {MAX_LABEL} && self.metadata.name.matches('{_CLUSTER_NAME}')",
    says="metadata.name is %s, %s characters: Services are named after it, "
    "so use at most 63 of a-z, 0-9 and -, a letter first and no - at the end",
    values=("self.metadata.name", "string(self.metadata.name.size())"),
    short="metadata.name: use at most 63 of a-z, 0-9 and -, a letter first and no - at the end",
)


def metadata_problems(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The faults for which the API server refuses this metadata of a PDCluster. We know only some of its rules."""
    found = [_name_problem(metadata["name"]), _namespace_problem(metadata.get("namespace"))]
    for field in ("labels", "annotations"):
        found += _text_problems(f"metadata.{field}", metadata.get(field) or {})
    return tuple(filter(None, found))


def _text_problems(path: str, texts: object) -> list[str]:
    if not isinstance(texts, dict):
        return [f"{path}: names with values are wanted, one a line"]
    return [f"{path}.{name}: {text_problem(value)}" for name, value in texts.items() if not isinstance(value, str)]


def _name_problem(name: object) -> str:
    if not isinstance(name, str):
        return f"metadata.name: {text_problem(name)}"
    is_taken = len(name) <= MAX_LABEL and re.fullmatch(_CLUSTER_NAME, name)
    return "" if is_taken else _NAME_RULE.says % (name, len(name))


def _namespace_problem(namespace: object) -> str:
    if namespace is None or namespace == "":
        return ""  # It is the context's.
    if not isinstance(namespace, str):
        return f"metadata.namespace: {text_problem(namespace)}"
    if len(namespace) <= MAX_LABEL and re.fullmatch(_DNS_LABEL, namespace):
        return ""
    return (
        f"metadata.namespace is {namespace}, {len(namespace)} characters: use at most {MAX_LABEL} of a-z, 0-9 and -, "
        "no - at either end"
    )


class PDCluster(ApiModel):
    """Prefill and decode engines that serve one model, and the routers in front of them."""

    api_version: Literal["pdcluster.dev/v1alpha1"]
    kind: Literal["PDCluster"]
    metadata: dict[str, Any]
    """Name and namespace. The name is a DNS label of at most 63 characters, for Services are named after it."""
    spec: PDClusterSpec
    """The desired state."""
    status: PDClusterStatus | None = None
    """The observed state. Only the operator writes it."""

    rules = (_NAME_RULE,)
