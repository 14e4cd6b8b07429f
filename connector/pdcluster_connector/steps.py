"""What the scheduler half tells the worker halves at each engine step.

Built once per step in the scheduler process and handed unchanged to every worker.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.ids import Attempt, EngineId, RequestId, TransferId
from pdcluster_protocol.params import SideChannelAddress


class Target(msgspec.Struct, frozen=True):
    """The decode engine that a push goes to. ``deadline_ms``: what is left for the request at this step."""

    engine_id: EngineId
    tp_size: int
    side_channels: tuple[SideChannelAddress, ...]
    deadline_ms: int


class PushSlice(msgspec.Struct, frozen=True):
    """The blocks of one request that become complete in this step; per KV group, pairs by position.

    The first slice of a request comes in the first step that computes it, perhaps without blocks, so that
    the grant is asked for while the first layer is computed.
    """

    request_id: RequestId
    transfer_id: TransferId
    attempt: Attempt
    token: str
    """The router's leave for this attempt; decode checks it."""
    target: Target
    prefill_blocks: tuple[tuple[int, ...], ...]
    decode_blocks: tuple[tuple[int, ...], ...]
    num_prompt_tokens: int
    is_last: bool


class PrefillStep(msgspec.Struct, frozen=True, tag="prefill"):
    """``preempted``: vLLM has taken these requests' blocks away and overwrites them in this step."""

    slices: tuple[PushSlice, ...] = ()
    preempted: tuple[RequestId, ...] = ()


class Expect(msgspec.Struct, frozen=True):
    """A request whose blocks wait for a push. ``num_blocks``: per KV group, how many blocks must come."""

    request_id: RequestId
    transfer_id: TransferId
    deadline_ms: int
    num_blocks: tuple[int, ...]


class Cancel(msgspec.Struct, frozen=True):
    """A request that no push may complete any more, and why."""

    request_id: RequestId
    reason: str


class PrefillEnded(msgspec.Struct, frozen=True):
    """The router says that the prompt of ``attempt`` is computed: every rank has asked to write, or never will."""

    request_id: RequestId
    attempt: Attempt


class DecodeStep(msgspec.Struct, frozen=True, tag="decode"):
    """``ended`` and ``cancels`` name requests of an earlier or of this very step's ``expects``."""

    expects: tuple[Expect, ...] = ()
    ended: tuple[PrefillEnded, ...] = ()
    cancels: tuple[Cancel, ...] = ()
