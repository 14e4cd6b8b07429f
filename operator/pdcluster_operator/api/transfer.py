"""How KV gets from prefill to decode: a part of a PDCluster's spec."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pdcluster_operator.api.base import DAY_S, ApiModel
from pdcluster_protocol.launch import MAX_MIN_PUSH_TOKENS, SIDE_CHANNEL_PORT, TransferProtocol
from pdcluster_protocol.metaserver import Action
from pdcluster_protocol.params import ContentCheck

DeviceName = Annotated[str, Field(max_length=63, pattern=r"^[A-Za-z0-9_.-]+$")]
"""A network device's name."""


class Transfer(ApiModel):
    """How KV gets from prefill to decode. A change rolls both roles, one of minPushTokens decode alone."""

    protocol: TransferProtocol | None = None
    """tcp, rdma or ascend. Default: ascend on ascend devices, else tcp, which works everywhere. With rdma
    engines run as root with IPC_LOCK and nothing else, for it pins memory; ask for your cards' resource in
    roles.*.resources.limits."""
    devices: list[DeviceName] | None = Field(default=None, min_length=1, max_length=32)
    """RDMA devices that engines may use, named as ibv_devices does, at most 32; only with protocol rdma. An engine
    whose node lacks one does not start. Default: Mooncake takes those that are near the memory."""
    port: int = Field(default=SIDE_CHANNEL_PORT, ge=1024, le=31000)
    """First port of decode's side channels: rank r listens on port + r, in [1024, 31000]; none may be 8000, where
    engines answer. Default 12100: below the ports that Mooncake draws from (from 15000) and those that Linux gives to
    outgoing connections (from 32768), whatever the rank, and none of vLLM's own."""
    deadline_seconds: int = Field(default=300, ge=1, le=DAY_S)
    """Seconds that one attempt at a prompt's prefill and hand-over may take, in [1, 86400]; then another prefill engine
    is asked. Default 300: a long prompt on a busy engine."""
    quarantine_seconds: int = Field(default=3, ge=1, le=600)
    """Seconds that a revoked prefill rank has to say that it stopped, before decode closes its session and uses the
    blocks again, in [1, 600]. Default 3: a live one answers in milliseconds."""
    content_check: ContentCheck | None = None
    """off, sampled or full: how much of the pushed KV decode compares with prefill's before the first token. Content
    that differs is pushed once more, then another prefill engine is asked. Default: sampled, the connector's own, which
    is nearly free; full finds each wrong byte, for some per cent of a prefill's time on a CPU."""
    min_push_tokens: int | None = Field(default=None, ge=0, le=MAX_MIN_PUSH_TOKENS)
    """Where fewer tokens of a prompt than this are missing on a decode engine, behind its own prefix cache, it computes
    them itself, in [0, 8192]; one of its steps takes no more of such tokens than this. A verification is always pushed.
    Default: 0, the connector's own: always push."""
    on_failure: Action = Action.RECOMPUTE
    """recompute: decode computes the prompt itself when no prefill attempt is left; fail: the client gets an error at
    once. Default recompute: a slow answer is better than none."""
