"""How engines and routers are started: names and ports that a launcher writes and the started process reads.

A launcher is the operator or the command line.

Source of truth of ``KVTransferConfig``: vLLM 0.32 ``config/kv_transfer.py``. Needs the standard library only:
``pdcluster ready`` and ``pdcluster drain`` import this module, and a probe must start quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Final, Literal, Self, TypeAlias, TypedDict

from pdcluster_protocol.labels import Role

CONNECTOR: Final = "PDClusterConnector"
"""vLLM finds the connector by this name once the connector's plugin has registered it."""
CONNECTOR_MODULE: Final = "pdcluster_connector.vllm.connector"
KV_ROLES: Final = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
"""vLLM's word for each role."""

HTTP_PORT: Final = 8000
"""Where engines and routers answer: vLLM's own default."""
INTERNAL_PORT: Final = HTTP_PORT + 1
"""A router's port for engines' callbacks, the operator's orders, metrics and pages."""
SIDE_CHANNEL_PORT: Final = 12100
"""Port of a pod's first decode rank; the other ranks have the next ones. Below the ports that Mooncake draws from."""
MOONCAKE_PORTS: Final = (15000, 29999)
"""The first and last port that Mooncake draws from. The connector sets this range unless the environment sets one."""

MAX_MIN_PUSH_TOKENS: Final = 8192
"""Upper bound of ``min_push_tokens``: the most tokens that vLLM by default computes in a step on a large GPU. More
tokens are a prefill engine's work."""

ENGINE_KEY_VARIABLE: Final = "VLLM_API_KEY"
"""The environment variable with the key that vLLM wants of each caller. The router sends the key."""


class TransferProtocol(StrEnum):
    """The protocol that carries the KV: Mooncake's own words, and those of all settings."""

    TCP = "tcp"
    RDMA = "rdma"
    ASCEND = "ascend"


class ConnectorSettings(TypedDict, total=False):
    """The connector's settings that a launcher writes. Units, ranges and defaults: the connector's own."""

    host: str
    side_channel_port: int
    transfer_protocol: str
    transfer_devices: tuple[str, ...]
    quarantine_s: float
    content_check: str
    min_push_tokens: int
    metaserver_ca: str
    metaserver_tls_name: str
    trace_file: str


class RouterPolicy(Enum):
    """How a router chooses one of the engines that may get a request. ``means``: for help and reference pages."""

    means: str

    def __new__(cls, word: str, means: str = "") -> Self:
        policy = object.__new__(cls)
        policy._value_, policy.means = word, means
        return policy

    LEAST_TOKENS = ("least-tokens", "the one with the least to do, good for any requests")
    AFFINITY = (
        "affinity",
        "the one that has had this conversation, or a short request's adapter, unless it has much more to do than the "
        "others: for agents and chats, whose prompts begin with what was said before",
    )

    @classmethod
    def explained(cls) -> str:
        """The description of the setting in router, operator and command line."""
        return " ".join(("How an engine is chosen for a request.", *(f"{one.value}: {one.means}." for one in cls)))


class ForwardedHeader(Enum):
    """The header in which proxies before a router tell their peers' addresses."""

    X_FORWARDED_FOR = "x-forwarded-for"
    """The one that nearly all of them write."""
    FORWARDED = "forwarded"
    """That of RFC 7239."""


class ProxyProtocol(Enum):
    """Whether connections to a router's client port begin with a PROXY header."""

    NONE = "none"
    """Not "off", which YAML takes for a boolean."""
    REQUIRED = "required"


RouterFlag: TypeAlias = Literal[
    "--access-log", "--advertise-url", "--api-key-file", "--cluster", "--decode", "--discovery", "--drain-timeout",
    "--engine-ca", "--engine-cert", "--engine-key", "--engine-tls-name", "--forwarded-header", "--host",
    "--internal-port", "--internal-tls-cert", "--internal-tls-key", "--jwt-audience", "--jwt-client-claim",
    "--jwt-issuer", "--jwt-key-set", "--model-alias", "--on-prefill-failure",
    "--picker-client-ca", "--picker-port", "--picker-tls-cert", "--picker-tls-key", "--policy",
    "--port", "--prefill", "--prefill-timeout", "--proxy-protocol", "--request-timeout", "--tls-cert", "--tls-key",
    "--trace-file", "--trusted-proxies",
]  # fmt: skip
"""The flags of ``pdcluster router`` that a launcher writes. Values, ranges and defaults: the router's own."""


def router_flag(name: RouterFlag, value: object) -> str:
    """The word of a command line that sets the flag: ``--port=8000``."""
    return f"{name}={value}"


def kv_transfer_config(
    role: Role, engine_id: str, settings: Mapping[str, object], load_failure_policy: str
) -> dict[str, object]:
    """vLLM's ``KVTransferConfig``, for JSON. ``settings``: ``ConnectorSettings``, and others that the user gives.

    ``load_failure_policy``: what decode does with a request whose KV did not come, ``fail`` or ``recompute``.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_role": KV_ROLES[role],
        "engine_id": engine_id,
        "kv_connector_extra_config": settings,
        "kv_load_failure_policy": load_failure_policy,
    }
