"""Decode's answers to vLLM: what a request waits for, and in the workers what has come.

Source of truth: vLLM 0.32 ``v1/core/sched/scheduler.py`` and ``v1/worker/kv_connector_model_runner_mixin.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.config import LoRAConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from pdcluster_connector.assembly import DecodeHalf, DecodeRank
from pdcluster_connector.core.reception import Lost
from pdcluster_connector.steps import DecodeStep
from pdcluster_connector.vllm.hooks import (
    Listening,
    LostAttempts,
    SchedulerHooks,
    StepMetadata,
    WorkerHooks,
    wanted_adapter,
)
from pdcluster_connector.vllm.load_errors import FailedBlocks, PushedBlocks
from pdcluster_connector.vllm.media import media_of
from pdcluster_connector.vllm.transfer_spans import TraceParents, TransferSpans, end_traced
from pdcluster_connector.worker.receiver import Receipts
from pdcluster_protocol.ids import RequestId

if TYPE_CHECKING:  # no engine fails because one of these has moved
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class DecodeSchedulerHooks(SchedulerHooks):
    """A decode engine's scheduler process."""

    def __init__(self, half: DecodeHalf, pushed_blocks: PushedBlocks | None, lora_config: LoRAConfig | None) -> None:
        """``pushed_blocks``: where vLLM is told of failures by their blocks; None: by their requests."""
        self.parts = (half,)
        self._requests = half.requests
        self._pushed_blocks = pushed_blocks
        self._lora_config = lora_config
        self._parents = TraceParents()

    def add(self, request: Request, params: dict[str, object], now: float) -> None:
        if not params.get("do_remote_prefill"):
            return
        adapter, media = wanted_adapter(request, self._lora_config), media_of(request)
        request_id, tokens = RequestId(request.request_id), request.prompt_token_ids or ()
        self._requests.add(request_id, params, tokens, adapter, media, now=now)
        self._parents.add(request)

    def refuse(self, request: Request, params: object, now: float) -> None:
        self._requests.add(RequestId(request.request_id), params, request.prompt_token_ids or (), now=now)

    def external_tokens(self, request_id: RequestId, num_computed_tokens: int) -> int:
        return self._requests.external_tokens(request_id, num_computed_tokens)

    def reserve(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int, now: float) -> None:
        tables = blocks.get_block_ids()
        self._requests.reserve(request.request_id, tables, num_external_tokens, now=now)
        if self._pushed_blocks and num_external_tokens:
            first = request.num_prompt_tokens - num_external_tokens
            self._pushed_blocks.reserve(request.request_id, tables[0], first)

    def step(self, output: SchedulerOutput, now: float) -> StepMetadata:  # noqa: ARG002  # for prefill
        pushed = self._pushed_blocks.take_new() if self._pushed_blocks else {}
        self._requests.begin(RequestId(new.req_id) for new in output.scheduled_new_reqs)
        return StepMetadata(self._requests.step(), pushed, self._parents.take_new())

    def workers_said(self, output: KVConnectorOutput, now: float) -> None:
        if output.invalid_block_ids:
            self._requests.first_steps.blocks_named(output.invalid_block_ids)
        self._requests.received(output.finished_recving or (), self._take_failed(output))
        if isinstance(lost := output.kv_connector_worker_meta, LostAttempts):
            for loss in lost.losses:
                self._requests.attempt_lost(loss.request_id, loss.attempt, loss.reason, now=now)

    def _take_failed(self, output: KVConnectorOutput) -> Iterable[RequestId]:
        if self._pushed_blocks is None:
            return output.failed_recving or ()
        failed = self._pushed_blocks.failed(output.invalid_block_ids)
        self._pushed_blocks.forget(output.finished_recving or ())
        return failed

    def finish(
        self,
        request_id: RequestId,
        now: float,  # noqa: ARG002  # for prefill
    ) -> tuple[bool, dict[str, object] | None]:
        return False, self._requests.finish(request_id)


class DecodeWorkerHooks(WorkerHooks):
    """A decode engine's worker process."""

    def __init__(self, rank: DecodeRank, page_tokens: tuple[int, ...], spans: TransferSpans) -> None:
        """``page_tokens``: as of ``Listening``."""
        self.parts = (self,)
        self._rank = rank
        self._spans = spans
        self.listening = Listening(rank.address, page_tokens)
        self._worker = rank.worker
        self._failed_blocks = FailedBlocks()

    def close(self, deadline: float) -> bool:
        """As of ``RunningPart``."""
        return end_traced(self._rank, self._spans, deadline)

    def begin_step(self, metadata: StepMetadata) -> None:
        self._spans.expect(metadata.parents)
        self._failed_blocks.begin_step(metadata.pushed)
        if isinstance(metadata.step, DecodeStep):
            self._worker.begin_step(metadata.step)

    def receipts(self) -> Receipts:
        receipts = self._worker.receipts()
        self._failed_blocks.ended(receipts.ended, receipts.failed)
        return receipts

    def load_errors(self) -> set[int]:
        """The blocks of failed waits, before vLLM 0.30. And one of each request that runs with an adapter of other
        content than its KV."""
        return self._failed_blocks.take() | self._worker.foreign_blocks()

    def losses(self) -> tuple[Lost, ...]:
        return tuple(self._worker.losses())
