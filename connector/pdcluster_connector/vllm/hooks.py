"""The questions of vLLM to a connector, and the answers of one that has nothing to do.

A hook is a call that vLLM makes to a connector. ``prefill_hooks.py`` and ``decode_hooks.py`` have the answers of the
roles, for both processes:

                 scheduler process                               worker process
    prefill      PrefillSchedulerHooks, from the start on        PrefillWorkerHooks, once the KV memory is there
    decode       DecodeSchedulerHooks, once workers listen       DecodeWorkerHooks, once the KV memory is there
    before that  SchedulerHooks                                  WorkerHooks

Source of truth: vLLM 0.32 ``kv_connector/v1/base.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.config import LoRAConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from pdcluster_connector.core.adapters import AdapterRequest
from pdcluster_connector.core.reception import Lost
from pdcluster_connector.ending import RunningPart
from pdcluster_connector.steps import DecodeStep, PrefillStep
from pdcluster_connector.vllm.adapters import adapter_of
from pdcluster_connector.vllm.load_errors import Blocks
from pdcluster_connector.worker.receiver import Receipts
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.params import SideChannelAddress

if TYPE_CHECKING:  # no engine fails because one of these has moved
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vllm is not followed by mypy
    """The metadata that vLLM carries from the scheduler to the workers at each step."""

    step: PrefillStep | DecodeStep
    pushed: Mapping[RequestId, Blocks] = field(default_factory=dict)
    """The blocks of new reservations; empty where vLLM is told of failures by request."""
    parents: Mapping[RequestId, str] = field(default_factory=dict)
    """The ``traceparent`` of new requests that are traced."""


@dataclass(frozen=True)
class Listening(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vllm is not followed by mypy
    """Where this worker's side channel listens, for the reservations that the scheduler posts."""

    address: SideChannelAddress
    page_tokens: tuple[int, ...]
    """Of each KV group; 1 where this worker has no layer of the group, or state."""


@dataclass(frozen=True)
class LostAttempts(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vllm is not followed by mypy
    """The metadata that vLLM carries from the workers to the scheduler: attempts that a decode rank has given up."""

    losses: tuple[Lost, ...]

    def aggregate(self, other: LostAttempts) -> LostAttempts:
        return LostAttempts(self.losses + other.losses)


class SchedulerHooks:
    """An engine that sends and receives nothing. vLLM's scheduler thread makes all calls; none may wait.

    ``now`` is in monotonic seconds.
    """

    parts: tuple[RunningPart, ...] = ()
    """They end with the engine."""

    def add(self, request: Request, params: dict[str, object], now: float) -> None:
        """A request with transfer parameters."""

    def refuse(self, request: Request, params: object, now: float) -> None:
        """A request whose transfer parameters are no JSON object. Its end says so."""

    def external_tokens(self, request_id: RequestId, num_computed_tokens: int) -> int:  # noqa: ARG002  # for decode
        """How many tokens after the computed ones a push shall bring."""
        return 0

    def reserve(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int, now: float) -> None:
        """vLLM has allocated ``blocks`` for the request."""

    def step(self, output: SchedulerOutput, now: float) -> StepMetadata:  # noqa: ARG002  # for prefill and decode
        """The metadata for the workers of the step that vLLM has scheduled."""
        return StepMetadata(DecodeStep())

    def workers_said(self, output: KVConnectorOutput, now: float) -> None:
        """All workers of a step have reported."""

    def finish(
        self,
        request_id: RequestId,  # noqa: ARG002  # for both roles
        now: float,  # noqa: ARG002  # for prefill
    ) -> tuple[bool, dict[str, object] | None]:
        """A request ends: whether vLLM must keep its blocks, and what its answer says as ``kv_transfer_params``."""
        return False, None


class WorkerHooks:
    """A worker that sends and receives nothing.

    Its forward thread makes all calls. None may wait but ``protect_preempted``.
    """

    parts: tuple[RunningPart, ...] = ()
    """They end with the engine."""
    listening: Listening | None = None
    """Where a decode rank listens; None: it is none, or does not listen yet."""

    def protect_preempted(self, metadata: KVConnectorMetadata) -> None:
        """vLLM is about to write into blocks of requests that the step has preempted. Waits until none of them is read,
        up to ``preempt_wait_s``."""

    def begin_step(self, metadata: StepMetadata) -> None:
        """A step begins."""

    def layer_saved(self, layer_name: str) -> None:
        """The forward pass has submitted the kernels that write this layer's KV."""

    def end_step(self) -> None:
        """The forward pass has submitted the kernels that write the KV of all layers."""

    def sent(self, finished: set[str]) -> set[RequestId]:  # noqa: ARG002  # for prefill
        """The requests whose blocks vLLM may free, now that those of ``finished`` compute no more."""
        return set()

    def receipts(self) -> Receipts:
        """The requests whose KV has come, or has failed to come, since the last call."""
        return Receipts()

    def load_errors(self) -> set[int]:
        """Blocks by which vLLM shall fail requests."""
        return set()

    def losses(self) -> tuple[Lost, ...]:
        """The attempts that were given up since the last call."""
        return ()


def wanted_adapter(request: Request, config: LoRAConfig | None) -> AdapterRequest | None:
    """The LoRA adapter that the request asks for; None: none."""
    if (wanted := request.lora_request) is None:
        return None
    assert config is not None, "vLLM takes a request with an adapter in an engine without"
    return adapter_of(wanted, config)
