"""The connector's settings: ``kv_connector_extra_config`` of ``--kv-transfer-config``, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from pdcluster_protocol.errors import ConfigError


class PushTiming(Enum):
    """When a complete layer leaves."""

    LAYERWISE = "layerwise"
    """While the next layer is computed."""
    SERIAL = "serial"
    """After the last forward pass of the prompt: what the benchmarks compare with."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine's connector. Times are seconds."""

    host: str = ""
    """Address by which the other engines reach this one. Default: vLLM's own (``VLLM_HOST_IP``)."""
    side_channel_port: int = 0
    """Decode rank r listens on this port + r, in [0, 65535]. Default 0: any free port, announced in the reservation."""
    transport: str = "mooncake"
    """Which transport moves the bytes. The only one that leaves a process is ``mooncake``."""
    transfer_protocol: str = "tcp"
    """Mooncake's protocol: ``tcp``, ``rdma`` or ``ascend``. Default ``tcp``: works everywhere."""
    push: PushTiming = PushTiming.LAYERWISE
    handshake_timeout_s: float = 10.0
    """How long a prefill rank waits for a decode rank's ``Welcome``. Default 10: a live one answers in ms."""
    quarantine_s: float = 35.0
    """How long blocks of a failed request stay out of use when a writer cannot say that it has stopped.
    Default 35: a live prefill answers in milliseconds, a dead one's writes end with its process. One that is stopped
    and resumes later than this may still write: only a hard fence, not built yet, shuts it out."""
    settle_s: float = 1.0
    """How long a write that failed may still land. Default 1: measured 50 ms with Mooncake 0.3.13 on a live peer."""
    preempt_wait_s: float = 1.0
    """How long the forward pass may wait for reads of blocks that vLLM took away from a preempted request.
    Default 1: a step's bytes leave in milliseconds; past it the push is given up, never torn."""
    trace_file: str = ""
    """Append one JSON line for each ended push or receive. Default: none."""


def parse_settings(extra_config: Mapping[str, object]) -> Settings:
    """Checked settings.

    Raises:
        ConfigError: An unknown key, a wrong type or a value out of bounds, named with the cure.
    """
    try:
        settings = msgspec.convert(dict(extra_config), Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(Settings.__struct_fields__)
        raise ConfigError(f"kv_connector_extra_config: {error}: the keys are {known}") from error
    if not 0 <= settings.side_channel_port <= 65535:
        raise ConfigError(f"side_channel_port is {settings.side_channel_port}: use a port in 0..65535 (0: any)")
    for name in ("handshake_timeout_s", "quarantine_s", "settle_s", "preempt_wait_s"):
        if getattr(settings, name) <= 0:
            raise ConfigError(f"{name} is {getattr(settings, name)}: use a positive number of seconds")
    return settings
