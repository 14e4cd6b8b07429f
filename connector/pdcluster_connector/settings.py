"""The connector's settings: ``kv_connector_extra_config`` of ``--kv-transfer-config``, checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from math import inf
from typing import Final

import msgspec

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.launch import MAX_MIN_PUSH_TOKENS, TransferProtocol
from pdcluster_protocol.params import ContentCheck

_DEVICE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,63}")
MAX_WRITES_IN_FLIGHT: Final = 1024
"""Per lane. Half of what Mooncake's TCP takes per peer by default (2,048), so one lane never fills it."""
MAX_BYTES_IN_FLIGHT: Final = 256 << 20
"""Per lane. A write that is under way cannot be stopped. 256 MiB take 2 s at 1 Gbit/s. That is less than
``quarantine_s``, so a cancelled request costs no other its session."""
MAX_BYTES_IN_SUBMIT: Final = MAX_BYTES_IN_FLIGHT // 8
"""The writes of a submit end together, and a lane looks each 1 to 8 ms: so several submits must be under way, or a fast
link would run dry. 224 MiB are 5 ms at 400 Gbit/s."""
CUT_S: Final = 2.0
"""The longest that closing a session may take: Mooncake 0.3.13 needs 0.8 s."""
ADAPTER_WAIT_S: Final = 10.0
"""The longest that a request waits until the content of its LoRA adapter is known: an adapter of 1 GB takes about a
second, once, after it was loaded."""
CLOSE_S: Final = 60.0
"""The longest that requests wait for a session to close; then the engine ends. So it is far longer than ``CUT_S``. No
request waits for an idle session that one peer has, which may take for ever."""


class PushTiming(Enum):
    """When a complete layer leaves."""

    LAYERWISE = "layerwise"
    """While the next layer is computed."""
    SERIAL = "serial"
    """After the last forward pass of the prompt: what the benchmarks compare with."""


class SessionUse(Enum):
    """How many transport sessions a rank has."""

    AUTO = "auto"
    OWN = "own"
    SHARED = "shared"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine's connector. Times are seconds."""

    host: str = ""
    """Address by which the other engines reach this one. Default: vLLM's own (``VLLM_HOST_IP``)."""
    side_channel_port: int = 0
    """Decode rank r (stage by stage, one data-parallel engine after the other) listens on this port + r, in
    [0, 65535]. Default 0: any free port, announced in the reservation."""
    transfer_protocol: str = TransferProtocol.TCP.value
    """Mooncake's protocol: ``tcp``, ``rdma`` or ``ascend``, the same on all engines. Default ``tcp``: works everywhere.
    It is enforced: the connector sets ``MC_FORCE_TCP`` or ``MC_FORCE_HCA``, and refuses other variables by which
    Mooncake chooses, and ``rdma`` without a device that the process may open."""
    transfer_devices: tuple[str, ...] = ()
    """The RDMA devices that Mooncake may use, named as ``ibv_devices`` does: ``["mlx5_0", "mlx5_1"]``. Only with
    ``transfer_protocol`` ``rdma``; each must be there and open. Default none: Mooncake takes those near the memory."""
    writes_per_submit: int = 0
    """Prefill: how many writes a lane hands to Mooncake in one call, in [0, 1024]; they end together. Default 0:
    chosen by ``transfer_protocol``."""
    sessions: SessionUse = SessionUse.AUTO
    """How many transport sessions a rank has. ``own``: one for each peer, so that cutting one off stops no other.
    ``shared``: one, so that memory is registered once; cutting off a peer ends all pushes that are under way or wait
    for their grant, and they come again or are recomputed. Default ``auto``: ``shared`` with ``ascend``, where a
    process may register 256 regions, else ``own``."""
    push: PushTiming = PushTiming.LAYERWISE
    """Prefill: when a complete layer leaves. ``layerwise``: while the next one is computed. ``serial``: after the
    prompt's last forward pass, which benchmarks compare with. Default ``layerwise``: the hand-over hides behind it."""
    handshake_timeout_s: float = 10.0
    """How long a prefill rank waits for a decode rank's ``Welcome``. Default 10: a live one answers in ms."""
    lease_s: float = 5.0
    """Decode: how long a prefill rank that holds a grant may be silent before its attempt is lost.
    Default 5: a live one speaks three times in it, from a thread of its own."""
    quarantine_s: float = 3.0
    """Decode: how long a revoked prefill rank may take to say that it has stopped, before its session is closed.
    Default 3: a live one answers in milliseconds, or when its writes in flight have ended."""
    hold_s: float = 3.0
    """Prefill: how long a write of an ended push may stay in flight before the lane's session is closed.
    Default 3: a live peer acknowledges 1,024 writes of 64 KiB in 0.6 s at 1 Gbit/s. Until then the blocks are held."""
    preempt_wait_s: float = 1.0
    """How long the forward pass may wait for reads of blocks that vLLM took away from a preempted request.
    Default 1: a step's bytes leave in milliseconds; past it the push is given up, never torn."""
    staging_bytes: int = 256 << 20
    """Prefill with token-major KV: memory of each rank, on its device, in which resharded KV waits for its writes.
    Default 256 MiB: what 1 GB/s carries in a quarter of a second. The same on all ranks; else none is taken."""
    strip_staging_bytes: int = 16 << 20
    """Prefill with ``tcp`` and other than token-major KV: memory of each rank, on its device, in which small strips for
    a decode engine of larger TP are gathered into fewer writes. 0, or 1 MiB and more. Default 16 MiB: 16 buffers, of
    which a lane fills four ahead; strips that find no space leave as they are. 0: never."""
    reshard_timeout_s: float = 60.0
    """Prefill with token-major KV: how long the other ranks of the engine may be late for an exchange of KV, after
    which no request is resharded any more until the engine is restarted. Default 60: a rank is late for a forward pass
    at most. A rank waits at most half of it for its device or for space. A part keeps wanted space for at most a sixth.
    At least 3 x (``hold_s`` + 2) and 2 x (``handshake_timeout_s`` + 2)."""
    content_check: ContentCheck = ContentCheck.SAMPLED
    """Decode: how much of the pushed KV is compared with what prefill has, before the first token: ``off``, ``sampled``
    or ``full``. Content that differs is pushed once more; if it differs again the attempt is lost. Default ``sampled``:
    nearly free, and finds a fault that is everywhere, such as a misread layout. ``full`` finds each wrong byte. A
    router's verification always uses ``full``. Prefill does what decode asks for, whatever its own setting is. On a CPU
    give it ``full`` too: an engine with ``full`` compiles a loop at its start (2 s, 125 MiB a rank) that finds all sums
    in a third of the time."""
    min_push_tokens: int = 0
    """Decode: where fewer tokens of a prompt than this are missing, behind its own prefix cache, it computes them
    itself and asks for no push; in [0, 8192]. One step takes no more of such tokens than this, over all requests, so
    streams beside them wait for no more; the next ones of that step are pushed. A verification is always pushed.
    Default 0: always push."""
    metaserver_ca: str = ""
    """Decode: PEM file with the authorities that the router's internal port is trusted by, or its certificate itself.
    Calls then go by https only. Default none: those of this system, where the router's URL is https."""
    metaserver_cert: str = ""
    """Decode: PEM file with the certificate that a router is shown which asks for one (``--internal-client-ca``).
    Default: none."""
    metaserver_key: str = ""
    """PEM file with the private key of ``metaserver_cert``, without a password. Default: none."""
    metaserver_tls_name: str = ""
    """Decode: the name that the router's certificate must have: routers are called by their addresses, which a
    certificate for a Service does not name. Calls then go by https only. Default: the host of the router's URL."""
    trace_file: str = ""
    """Append one JSON line for each ended push or receive. Default: none."""

    @property
    def shares_session(self) -> bool:
        """Whether all peers of a rank use one transport session."""
        must_share = self.transfer_protocol == TransferProtocol.ASCEND
        return self.sessions is SessionUse.SHARED or (self.sessions is SessionUse.AUTO and must_share)

    @property
    def gathers_strips(self) -> bool:
        """Whether small strips may be gathered. Over TCP only: each write is a call there, where it was measured."""
        return self.transfer_protocol == TransferProtocol.TCP and self.strip_staging_bytes > 0

    def ask_s(self, *, has_adapters: bool) -> float:
        """Decode: how long, once prefill has ended, its ranks may still ask to write.

        Each shakes hands first, and then looks for the content of its adapter. One that has failed at it says so; the
        lease is for what lies between. Decode's own ``handshake_timeout_s`` stands for prefill's.
        """
        return self.handshake_timeout_s + (ADAPTER_WAIT_S if has_adapters else 0) + self.lease_s

    @property
    def staged_s(self) -> float:
        """How long a part may lie in staging memory once others want its space; then its push is given up.

        Its writes end within ``hold_s`` or are cut, all before the resharder gives up its wait for space.
        """
        return self.reshard_timeout_s / 6

    @property
    def least_reshard_timeout_s(self) -> float:
        """With less, the resharder could give up waiting for space that is about to come back.

        Within this time the parts that keep the space are given up and their writes cut. A decode rank that never
        answers is given up too: until then its lane takes more parts.
        """
        return max(3 * (self.hold_s + CUT_S), 2 * (self.handshake_timeout_s + CUT_S))

    @property
    def reshard_wait_s(self) -> float:
        """The most that the resharder waits for the device, and for space."""
        return self.reshard_timeout_s / 2


def require_ipv4(host: str) -> None:
    """Side channels (ZeroMQ without its IPv6 option) and Mooncake 0.3.13 listen on IPv4 here.

    Raises:
        ConfigError: ``host`` is an IPv6 address.
    """
    if ":" in host:
        raise ConfigError(
            f"this engine's address is {host}, and engines reach each other by IPv4 only: set VLLM_HOST_IP to an IPv4 "
            "address of this machine; on Kubernetes give pods IPv4 addresses, or both with IPv4 first"
        )


_MOST: Final = {
    "side_channel_port": (65535, "any"),
    "writes_per_submit": (MAX_WRITES_IN_FLIGHT, "chosen by transfer_protocol"),
    "min_push_tokens": (MAX_MIN_PUSH_TOKENS, "always push"),
}
"""The upper bound of a setting, and what 0 means for it."""


def parse_settings(extra_config: Mapping[str, object]) -> Settings:
    """Checked settings.

    Raises:
        ConfigError: An unknown key, a wrong type or a value out of bounds, named with the cure.
    """
    try:
        settings = msgspec.convert(dict(extra_config), Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}: {_cure(str(error))}") from error
    for name, (most, zero) in _MOST.items():
        if not 0 <= (value := getattr(settings, name)) <= most:
            raise ConfigError(f"{name} is {value}: use a number in 0..{most} (0: {zero})")
    for name in (name for name in Settings.__struct_fields__ if name.endswith("_s")):
        if not 0 < getattr(settings, name) < inf:  # JSON in Python may say NaN and Infinity
            raise ConfigError(f"{name} is {getattr(settings, name)}: use a positive number of seconds")
    if settings.reshard_timeout_s < settings.least_reshard_timeout_s:
        raise ConfigError(
            f"reshard_timeout_s is {settings.reshard_timeout_s:g} with hold_s {settings.hold_s:g} and "
            f"handshake_timeout_s {settings.handshake_timeout_s:g}: use {settings.least_reshard_timeout_s:g} or more"
        )
    _check_staging(settings)
    _check_devices(settings)
    return settings


def _check_staging(settings: Settings) -> None:
    if settings.staging_bytes < 1:
        raise ConfigError(f"staging_bytes is {settings.staging_bytes}: use a positive number of bytes")
    if settings.strip_staging_bytes and settings.strip_staging_bytes < 1 << 20:
        raise ConfigError(
            f"strip_staging_bytes is {settings.strip_staging_bytes}: use {1 << 20} bytes or more (0: gather no strips)"
        )


def _cure(problem: str) -> str:
    """The choices, where the value is none of a setting's choices; else the keys."""
    for field in msgspec.structs.fields(Settings):
        if f"$.{field.name}`" in problem and isinstance(field.type, type) and issubclass(field.type, Enum):
            return f"use one of {', '.join(choice.value for choice in field.type)}"
    return f"the keys are {', '.join(Settings.__struct_fields__)}"


def _check_devices(settings: Settings) -> None:
    if settings.transfer_devices and settings.transfer_protocol != TransferProtocol.RDMA:
        raise ConfigError(
            f"transfer_devices is {list(settings.transfer_devices)} with transfer_protocol "
            f"{settings.transfer_protocol}, which uses none: leave transfer_devices out, or use transfer_protocol rdma"
        )
    # Mooncake takes the names in one line with commas between them.
    if wrong := [name for name in settings.transfer_devices if not _DEVICE_NAME.fullmatch(name)]:
        raise ConfigError(f"transfer_devices has {wrong[0]!r}: use a list of names as of ibv_devices, as mlx5_0")
