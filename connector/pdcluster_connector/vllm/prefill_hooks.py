"""Prefill's answers to vLLM: what a request pushes, and in the workers which layer may leave.

Source of truth: vLLM 0.32 ``v1/core/sched/scheduler.py`` and ``v1/worker/kv_connector_model_runner_mixin.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vllm.config import LoRAConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from pdcluster_connector.assembly import PrefillRank
from pdcluster_connector.scheduler.prefill import BlockTable, PrefillScheduler, Scheduled
from pdcluster_connector.scheduler.prefill_times import PrefillTimes
from pdcluster_connector.steps import PrefillStep
from pdcluster_connector.vllm.block_tables import Preemptions
from pdcluster_connector.vllm.hooks import SchedulerHooks, StepMetadata, WorkerHooks, wanted_adapter
from pdcluster_connector.vllm.media import media_of
from pdcluster_connector.vllm.transfer_spans import TraceParents, TransferSpans, end_traced
from pdcluster_protocol.ids import RequestId

if TYPE_CHECKING:  # no engine fails because one of these has moved
    from vllm.v1.request import Request


class PrefillSchedulerHooks(SchedulerHooks):
    """A prefill engine's scheduler process."""

    def __init__(
        self,
        scheduler: PrefillScheduler,
        tables_of: Callable[[SchedulerOutput], Callable[[RequestId], BlockTable]],
        lora_config: LoRAConfig | None,
        *,
        keeps_last_token: bool,
    ) -> None:
        """``tables_of``: all block tables as of a step. ``keeps_last_token``: decode computes a prompt's last token."""
        self._scheduler = scheduler
        self._tables_of = tables_of
        self._lora_config = lora_config
        self._keeps_last_token = keeps_last_token
        self._preemptions = Preemptions()
        self._times = PrefillTimes()
        self._parents = TraceParents()

    def add(self, request: Request, params: dict[str, object], now: float) -> None:
        if not params.get("do_remote_decode"):
            return
        if self._keeps_last_token:
            leave_out_last_token(request)
        adapter, media = wanted_adapter(request, self._lora_config), media_of(request)
        request_id, tokens = RequestId(request.request_id), request.prompt_token_ids or ()
        self._scheduler.add(request_id, params, tokens, adapter, media, now=now)
        self._times.add(request_id, now=now)
        self._preemptions.add(request)
        self._parents.add(request)

    def refuse(self, request: Request, params: object, now: float) -> None:
        self._scheduler.add(RequestId(request.request_id), params, request.prompt_token_ids or (), now=now)

    def step(self, output: SchedulerOutput, now: float) -> StepMetadata:
        preempted = self._preemptions.take_new() | (output.preempted_req_ids or set())
        for new in output.scheduled_new_reqs:
            self._times.begin(RequestId(new.req_id), now=now)
        step = self._scheduler.step(_scheduled(output), preempted, self._tables_of(output), now=now)
        return StepMetadata(step, parents=self._parents.take_new())

    def workers_said(self, output: KVConnectorOutput, now: float) -> None:  # noqa: ARG002  # for decode
        self._scheduler.freed(map(RequestId, output.finished_sending or ()))

    def finish(self, request_id: RequestId, now: float) -> tuple[bool, dict[str, object] | None]:
        self._preemptions.forget(request_id)
        keeps_blocks, said = self._scheduler.finish(request_id)
        times = self._times.finish(request_id, now=now).to_wire()
        return keeps_blocks, {**(said or {}), **times} or None


class PrefillWorkerHooks(WorkerHooks):
    """A prefill engine's worker process."""

    def __init__(self, rank: PrefillRank, spans: TransferSpans) -> None:
        self.parts = (self,)
        self._rank = rank
        self._worker = rank.worker
        self._spans = spans
        self._protected: PrefillStep | None = None

    def close(self, deadline: float) -> bool:
        """As of ``RunningPart``."""
        return end_traced(self._rank, self._spans, deadline)

    def protect_preempted(self, metadata: KVConnectorMetadata) -> None:
        """The V2 runner calls it twice with the same step: ``v2_runner.py`` says why."""
        step = _step_of(metadata)
        if step is not None and step.preempted and step is not self._protected:
            self._protected = step
            self._worker.protect_preempted(step.preempted)

    def begin_step(self, metadata: StepMetadata) -> None:
        self._spans.expect(metadata.parents)
        if (step := _step_of(metadata)) is not None:
            self._worker.begin_step(step)

    def layer_saved(self, layer_name: str) -> None:
        self._worker.layer_saved(layer_name)

    def end_step(self) -> None:
        self._worker.end_step()

    def sent(self, finished: set[str]) -> set[RequestId]:
        return self._worker.finished(map(RequestId, finished))


def _step_of(metadata: KVConnectorMetadata) -> PrefillStep | None:
    """None: the metadata is another connector's."""
    if isinstance(metadata, StepMetadata) and isinstance(metadata.step, PrefillStep):
        return metadata.step
    return None


def _scheduled(output: SchedulerOutput) -> Iterable[Scheduled]:
    """Every request that this step computes, with how many of its tokens are computed after it."""
    step_tokens, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    for new in output.scheduled_new_reqs:
        yield Scheduled(RequestId(new.req_id), new.num_computed_tokens + step_tokens[new.req_id])
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield Scheduled(RequestId(request_id), computed + step_tokens[request_id])


def leave_out_last_token(request: Request) -> None:
    """The prompt loses its last token: decode computes that one, and prefill all others (``num_kept_back``).

    As vLLM 0.32's ``mooncake_connector.py`` does for hybrid models. Called once for a request, before it is scheduled.
    """
    if request.prompt_token_ids and request.num_prompt_tokens > 1:
        request.prompt_token_ids.pop()
        request._all_token_ids.pop()
        request.num_prompt_tokens -= 1
