"""The vLLM facade: ``KVConnectorBase_V1`` in front, our two halves behind.

vLLM makes one connector in the scheduler process and one in each worker process. It calls them in the order that
``v1/worker/kv_connector_model_runner_mixin.py`` and ``v1/core/sched/scheduler.py`` of vLLM 0.32 show. Each method here
hands over to the half that its process and role need. ``versions.py`` says how older versions differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdcluster_connector.vllm.versions import RELEASE  # isort: skip  # first: refuses a vLLM that lacks what follows
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from pdcluster_connector.assembly import (
    DecodeHalf,
    DecodeRank,
    PrefillRank,
    make_decode_rank,
    make_prefill_rank,
    new_boot_id,
)
from pdcluster_connector.core.adapters import AdapterRequest
from pdcluster_connector.core.reception import Lost
from pdcluster_connector.ending import end_parts
from pdcluster_connector.failures import take_counts
from pdcluster_connector.scheduler.prefill import PrefillEngine, PrefillScheduler, Scheduled
from pdcluster_connector.steps import DecodeStep, PrefillStep
from pdcluster_connector.vllm.adapters import adapter_of, unwatch, watch_loads
from pdcluster_connector.vllm.block_tables import BlockTables, Preemptions, resolved
from pdcluster_connector.vllm.cells import LayerKv, in_new_axes
from pdcluster_connector.vllm.facts import (
    own_layers,
    page_tokens_of,
    read_engine_facts,
    read_memory,
    read_token_memory,
)
from pdcluster_connector.vllm.fingerprint import head_major
from pdcluster_connector.vllm.load_errors import Blocks, FailedBlocks, PushedBlocks
from pdcluster_connector.vllm.media import media_of
from pdcluster_connector.vllm.metrics import CountMetrics, StepCounts
from pdcluster_connector.vllm.v2_runner import ask_before_writes, ask_no_more
from pdcluster_connector.worker.receiver import Receipts
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.labels import Role
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


class PDClusterConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vllm is not followed by mypy
    """Pushes KV layer by layer (``kv_role`` ``kv_producer``) or waits for it (``kv_consumer``)."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._facts = read_engine_facts(vllm_config, kv_cache_config)
        self._prefill_scheduler: PrefillScheduler | None = None
        self._decode_half: DecodeHalf | None = None
        self._prefill_rank: PrefillRank | None = None
        self._decode_rank: DecodeRank | None = None
        self._listening: Listening | None = None
        self._block_tables = resolved if RELEASE.resolves_block_ids else BlockTables().follow
        self._preemptions = Preemptions()
        self._protected: PrefillStep | None = None
        self._pushed_blocks = None if RELEASE.fails_by_request else PushedBlocks(self._facts.groups[0].block_tokens)
        self._failed_blocks = FailedBlocks()
        self._adapters = None if role is KVConnectorRole.SCHEDULER else watch_loads(vllm_config.lora_config)
        if role is KVConnectorRole.SCHEDULER and self._facts.role is Role.PREFILL:
            engine = PrefillEngine(self._facts.tp_size, self._facts.kv_heads, self._facts.groups)
            self._prefill_scheduler = PrefillScheduler(
                engine, self._facts.settings.push, self._facts.secret, new_boot_id()
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Head-major, so that any rank's heads are one slice of a block; MLA has no heads to order."""
        return None if vllm_config.model_config.use_mla else head_major(RELEASE.names_layouts)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, object]) -> bool:  # noqa: ARG003  # vLLM's signature
        """No: one graph may run a whole step that only decodes. Such a graph calls no hook; ``end_step`` then orders
        its layers. ``read_engine_facts`` refuses such graphs for layerwise prefill steps.
        """
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: object) -> bool:  # noqa: ARG003  # vLLM's signature
        """No: ``read_engine_facts`` refuses sleep mode. vLLM 0.33 asks, and assumes yes without this method."""
        return False

    # Scheduler process.

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002  # vLLM's signature
        """A push fills the request's own blocks in every group."""
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Listening]) -> None:
        """Every worker's side channel is known: reservations can name them."""
        if self._facts.role is not Role.DECODE:
            return
        workers = [metadata[rank] for rank in sorted(metadata)]
        pages = tuple(map(max, zip(*(worker.page_tokens for worker in workers), strict=True)))
        self._decode_half = DecodeHalf(self._facts, tuple(worker.address for worker in workers), pages)

    def on_new_request(self, request: Request) -> None:
        params, now = request.kv_transfer_params, time.monotonic()
        if not params:
            return
        request_id = RequestId(request.request_id)
        if not isinstance(params, dict):
            self._refuse(request, params, now)
            return
        if self._prefill_scheduler and params.get("do_remote_decode") and self._facts.keeps_last_token:
            leave_out_last_token(request)
        tokens, media = request.prompt_token_ids or (), media_of(request)
        adapter = self._adapter_of(request)
        if self._prefill_scheduler and params.get("do_remote_decode"):
            self._prefill_scheduler.add(request_id, params, tokens, adapter, media, now=now)
            self._preemptions.add(request)
        if self._decode_half and params.get("do_remote_prefill"):
            self._decode_half.requests.add(request_id, params, tokens, adapter, media, now=now)

    def _adapter_of(self, request: Request) -> AdapterRequest | None:
        if (wanted := request.lora_request) is None:
            return None
        config = self._vllm_config.lora_config
        assert config is not None, "vLLM takes a request with an adapter in an engine without"
        return adapter_of(wanted, config)

    def _refuse(self, request: Request, params: object, now: float) -> None:
        """The transfer parameters are no JSON object, and the request's end says so. The request loses them: vLLM would
        next look a key up in them, and the engine would end."""
        request.kv_transfer_params = {}
        request_id, tokens = RequestId(request.request_id), request.prompt_token_ids or ()
        if self._prefill_scheduler:
            self._prefill_scheduler.add(request_id, params, tokens, now=now)
        if self._decode_half:
            self._decode_half.requests.add(request_id, params, tokens, now=now)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._decode_half is None:
            return 0, False
        num_tokens = self._decode_half.requests.external_tokens(request.request_id, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._decode_half is not None:
            tables = blocks.get_block_ids()
            self._decode_half.requests.reserve(request.request_id, tables, num_external_tokens, now=time.monotonic())
            if self._pushed_blocks and num_external_tokens:
                first = request.num_prompt_tokens - num_external_tokens
                self._pushed_blocks.reserve(request.request_id, tables[0], first)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        if self._prefill_scheduler is None:
            pushed = self._pushed_blocks.take_new() if self._pushed_blocks else {}
            return StepMetadata(self._decode_step(scheduler_output), pushed)
        return StepMetadata(
            self._prefill_scheduler.step(
                _scheduled(scheduler_output),
                self._preemptions.take_new() | (scheduler_output.preempted_req_ids or set()),
                self._block_tables(scheduler_output),
                now=time.monotonic(),
            )
        )

    def _decode_step(self, output: SchedulerOutput) -> DecodeStep:
        if self._decode_half is None:
            return DecodeStep()
        self._decode_half.requests.begin(RequestId(new.req_id) for new in output.scheduled_new_reqs)
        return self._decode_half.requests.step()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._prefill_scheduler is not None:
            self._prefill_scheduler.freed(map(RequestId, connector_output.finished_sending or ()))
        if self._decode_half is not None:
            requests = self._decode_half.requests
            if connector_output.invalid_block_ids:
                requests.first_steps.blocks_named(connector_output.invalid_block_ids)
            requests.received(connector_output.finished_recving or (), self._take_failed(connector_output))
            if isinstance(lost := connector_output.kv_connector_worker_meta, LostAttempts):
                for loss in lost.losses:
                    requests.attempt_lost(loss.request_id, loss.attempt, loss.reason, now=time.monotonic())

    def _take_failed(self, output: KVConnectorOutput) -> Iterable[RequestId]:
        if self._pushed_blocks is None:
            return output.failed_recving or ()
        failed = self._pushed_blocks.failed(output.invalid_block_ids)
        self._pushed_blocks.forget(output.finished_recving or ())
        return failed

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, object] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002  # vLLM's signature
    ) -> tuple[bool, dict[str, object] | None]:
        if self._prefill_scheduler is not None:
            self._preemptions.forget(request.request_id)
            return self._prefill_scheduler.finish(request.request_id)
        if self._decode_half is not None:
            return False, self._decode_half.requests.finish(request.request_id)
        return False, None

    # Worker processes. All but ``register_kv_caches`` and ``shutdown`` are called by the forward thread.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = own_layers(self._kv_cache_config, self._in_axes(kv_caches))
        memory = read_memory(self._facts, self._vllm_config, self._kv_cache_config, layers)
        if self._facts.role is Role.PREFILL:
            tokens = read_token_memory(self._facts, memory, self._kv_cache_config, layers)
            self._prefill_rank = make_prefill_rank(self._facts, memory, tokens, adapters=self._adapters)
            ask_before_writes(self._before_writes)
        else:
            self._decode_rank = make_decode_rank(self._facts, memory, adapters=self._adapters)
            self._listening = Listening(self._decode_rank.address, page_tokens_of(memory.layout, self._facts.groups))

    def _in_axes(self, kv_caches: Mapping[str, LayerKv]) -> Mapping[str, LayerKv]:
        if RELEASE.names_layouts:
            return kv_caches
        return in_new_axes(self._vllm_config.compilation_config.static_forward_context, kv_caches)

    def get_handshake_metadata(self) -> Listening | None:
        return self._listening

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """The V2 runner calls it twice with the same step: ``v2_runner.py`` says why."""
        step = kv_connector_metadata.step
        if self._prefill_rank and isinstance(step, PrefillStep) and step.preempted and step is not self._protected:
            self._protected = step
            self._prefill_rank.worker.protect_preempted(step.preempted)

    def _before_writes(self, metadata: KVConnectorMetadata) -> None:
        if isinstance(metadata, StepMetadata):
            self.handle_preemptions(metadata)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        step = connector_metadata.step
        self._failed_blocks.begin_step(connector_metadata.pushed)
        if self._prefill_rank and isinstance(step, PrefillStep):
            self._prefill_rank.worker.begin_step(step)
        if self._decode_rank and isinstance(step, DecodeStep):
            self._decode_rank.worker.begin_step(step)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002  # vLLM's signature
        attn_metadata: object,  # noqa: ARG002  # vLLM's signature
        **kwargs: object,  # noqa: ARG002  # vLLM's signature
    ) -> None:
        if self._prefill_rank:
            self._prefill_rank.worker.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        if self._prefill_rank:
            self._prefill_rank.worker.end_step()

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Nothing to start: prefill pushes."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only when all of its KV is here."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        results = base.KVConnectorTransferResults()
        sent, receipts = self._ended(finished_req_ids)
        results.finished_sending = sent
        results.finished_recving, results.failed_recving = receipts.ended, receipts.failed
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[RequestId], set[RequestId]]:
        """vLLM before 0.30 calls this method, and then ``get_block_ids_with_load_errors``."""
        sent, receipts = self._ended(finished_req_ids)
        self._failed_blocks.ended(receipts.ended, receipts.failed)
        return sent, receipts.ended

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of failed waits, before 0.30. And one of each request that runs with an adapter of other content
        than its KV."""
        foreign = self._decode_rank.worker.foreign_blocks() if self._decode_rank else set()
        return self._failed_blocks.take() | foreign

    def _ended(self, finished_req_ids: set[str]) -> tuple[set[RequestId], Receipts]:
        prefill, decode = self._prefill_rank, self._decode_rank
        sent = prefill.worker.finished(map(RequestId, finished_req_ids)) if prefill else set()
        return sent, decode.worker.receipts() if decode else Receipts()

    def build_connector_worker_meta(self) -> LostAttempts | None:
        losses = self._decode_rank.worker.losses() if self._decode_rank else ()
        return LostAttempts(tuple(losses)) if losses else None

    # Either process.

    def get_kv_connector_stats(self) -> StepCounts | None:
        counts = take_counts()
        return StepCounts(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, int] | None = None) -> StepCounts:
        return StepCounts(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CountMetrics:
        return CountMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        ask_no_more(self._before_writes)
        if self._adapters is not None:
            unwatch(self._adapters)
        parts = (self._decode_half, self._prefill_rank, self._decode_rank, self._adapters)
        end_parts([part for part in parts if part is not None])


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
