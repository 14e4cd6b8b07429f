"""Messages from the scheduler half to the worker halves at each engine step.

Built once per step in the scheduler process and handed unchanged to every worker.
"""

from __future__ import annotations

import msgspec

from pdcluster_connector.core.adapters import AdapterRequest
from pdcluster_connector.core.ranges import GroupSlice, Spans
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.params import ContentCheck, SideChannelAddress


class PushTarget(msgspec.Struct, frozen=True):
    """The decode engine that a push goes to. ``deadline_ms``: the request's remaining time at this step."""

    engine_id: EngineId
    tp_size: int
    side_channels: tuple[SideChannelAddress, ...]
    """The address of each rank, stage by stage."""
    deadline_ms: int
    block_tokens: tuple[int, ...] = ()
    """Tokens in a block of each of decode's KV groups; 0: recurrent state. Only token-major KV needs them."""
    page_tokens: tuple[int, ...] = ()
    """Tokens in a page of each of decode's KV groups, likewise."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the decode engine."""
        return len(self.side_channels) // self.tp_size


class ContentOrder(msgspec.Struct, frozen=True):
    """The content of a request that this engine is to sum up, per KV group.

    ``spans``: positions that decode wants, worked out alike on both engines. ``tables``: this engine's own blocks from
    the prompt's first position on, straight from vLLM; for state, its one block.
    """

    spans: Spans
    tables: tuple[tuple[int, ...], ...]
    check: ContentCheck = ContentCheck.FULL
    targets: tuple[tuple[int, ...], ...] = ()
    """On prefill, for a second push: decode's blocks, in the form of ``tables``."""


class PushSlice(msgspec.Struct, frozen=True):
    """The part of one request that this step completes, for each KV group.

    The first slice of a request comes in the first step that computes it, perhaps without blocks, so that
    the grant is asked for while the first layer is computed.
    """

    request_id: RequestId
    transfer_id: TransferId
    attempt: Attempt
    attempt_token: str
    """The router's leave for this attempt; decode checks it."""
    target: PushTarget
    groups: tuple[GroupSlice, ...]
    num_prompt_tokens: int
    is_last: bool
    content: ContentOrder | None = None
    """Set in the last slice of a request whose content is compared."""
    adapter: AdapterRequest | None = None
    """The LoRA adapter with which the request is computed; None: it has none."""


class PrefillStep(msgspec.Struct, frozen=True, tag="prefill"):
    """Slices to push. ``preempted``: vLLM has taken these requests' blocks away and overwrites them in this step."""

    life: BootId
    """The boot id that all ranks of the engine tell decode; the same in each step."""
    slices: tuple[PushSlice, ...] = ()
    preempted: tuple[RequestId, ...] = ()


class Expect(msgspec.Struct, frozen=True):
    """A request whose blocks wait for a push. ``spans``: per KV group, the token positions that must come."""

    request_id: RequestId
    transfer_id: TransferId
    deadline_ms: int
    spans: Spans
    content: ContentOrder | None = None
    """Set if the request's content is compared."""
    is_proof: bool = False
    """Whether the request shall prove that pushes go well. If its content differs it is not pushed again."""
    adapter: AdapterRequest | None = None
    """The LoRA adapter with which the request decodes; None: it has none."""


class Cancel(msgspec.Struct, frozen=True):
    """A request that no push may complete any more, and why."""

    request_id: RequestId
    reason: str


class PrefillEnded(msgspec.Struct, frozen=True):
    """The router says that the prompt of ``attempt`` is computed. A rank that has not asked to write must ask soon."""

    request_id: RequestId
    attempt: Attempt


class FirstStep(msgspec.Struct, frozen=True):
    """A request with an adapter and pushed KV, which is computed for the first time. ``block``: one that the push has
    filled; None: vLLM cannot be told by a block that the request must not run."""

    request_id: RequestId
    transfer_id: TransferId
    block: int | None


class DecodeStep(msgspec.Struct, frozen=True, tag="decode"):
    """News for a decode rank. All but ``expects`` name requests that this step or an earlier one expects.

    Each expected request with an adapter is named once in ``first_steps`` or in ``left``.
    """

    expects: tuple[Expect, ...] = ()
    ended: tuple[PrefillEnded, ...] = ()
    cancels: tuple[Cancel, ...] = ()
    first_steps: tuple[FirstStep, ...] = ()
    """This step computes them."""
    left: tuple[RequestId, ...] = ()
    """Requests that have ended without a first step, or whose KV did not come."""
