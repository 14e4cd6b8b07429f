"""The vLLM facade: ``KVConnectorBase_V1`` in front, our hooks behind.

vLLM makes one connector in the scheduler process and one in each worker process. It calls them in the order that
``v1/worker/kv_connector_model_runner_mixin.py`` and ``v1/core/sched/scheduler.py`` of vLLM 0.32 show. Each method here
hands over to the hooks of its process, which ``hooks.py`` explains. The role is asked where hooks are made, and nowhere
else. ``versions.py`` says how older versions differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pdcluster_connector.vllm.versions import RELEASE  # isort: skip  # first: refuses a vLLM that lacks what follows
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from pdcluster_connector.assembly import DecodeHalf, make_decode_rank, make_prefill_rank, new_boot_id
from pdcluster_connector.ending import end_parts
from pdcluster_connector.failures import take_counts
from pdcluster_connector.scheduler.prefill import PrefillEngine, PrefillScheduler
from pdcluster_connector.vllm.adapters import unwatch, watch_loads
from pdcluster_connector.vllm.block_tables import BlockTables, resolved
from pdcluster_connector.vllm.cells import LayerKv, in_new_axes
from pdcluster_connector.vllm.decode_hooks import DecodeSchedulerHooks, DecodeWorkerHooks
from pdcluster_connector.vllm.facts import (
    own_layers,
    page_tokens_of,
    read_engine_facts,
    read_memory,
    read_token_memory,
)
from pdcluster_connector.vllm.fingerprint import head_major
from pdcluster_connector.vllm.hooks import Listening, LostAttempts, SchedulerHooks, StepMetadata, WorkerHooks
from pdcluster_connector.vllm.load_errors import PushedBlocks
from pdcluster_connector.vllm.metrics import CountMetrics, StepCounts
from pdcluster_connector.vllm.prefill_hooks import PrefillSchedulerHooks, PrefillWorkerHooks
from pdcluster_connector.vllm.transfer_spans import TransferSpans
from pdcluster_connector.vllm.v2_runner import ask_before_writes, ask_no_more
from pdcluster_connector.vllm.whole import with_whole
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.labels import Role

if TYPE_CHECKING:  # no engine fails because one of these has moved
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class PDClusterConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vllm is not followed by mypy
    """Pushes KV layer by layer (``kv_role`` ``kv_producer``) or waits for it (``kv_consumer``)."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._facts = read_engine_facts(vllm_config, kv_cache_config)
        self._adapters = None if role is KVConnectorRole.SCHEDULER else watch_loads(vllm_config.lora_config)
        self._scheduler_hooks, self._worker_hooks = SchedulerHooks(), WorkerHooks()
        if role is KVConnectorRole.SCHEDULER and self._facts.role is Role.PREFILL:
            self._scheduler_hooks = self._prefill_hooks()

    def _prefill_hooks(self) -> SchedulerHooks:
        facts = self._facts
        engine = PrefillEngine(facts.tp_size, facts.kv_heads, facts.groups)
        scheduler = PrefillScheduler(engine, facts.settings.push, facts.secret, new_boot_id())
        tables_of = resolved if RELEASE.resolves_block_ids else BlockTables().follow
        lora_config = self._vllm_config.lora_config
        return PrefillSchedulerHooks(scheduler, tables_of, lora_config, keeps_last_token=facts.keeps_last_token)

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
        half = DecodeHalf(self._facts, tuple(worker.address for worker in workers), pages)
        pushed_blocks = None if RELEASE.fails_by_request else PushedBlocks(self._facts.groups[0].block_tokens)
        self._scheduler_hooks = DecodeSchedulerHooks(half, pushed_blocks, self._vllm_config.lora_config)

    def on_new_request(self, request: Request) -> None:
        """A request that has transfer parameters which are no JSON object loses them: vLLM would next look a key up in
        them, and the engine would end."""
        params = request.kv_transfer_params
        if not params:
            return
        if isinstance(params, dict):
            self._scheduler_hooks.add(request, params, time.monotonic())
            return
        request.kv_transfer_params = {}
        self._scheduler_hooks.refuse(request, params, time.monotonic())

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._scheduler_hooks.external_tokens(request.request_id, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler_hooks.reserve(request, blocks, num_external_tokens, time.monotonic())

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return self._scheduler_hooks.step(scheduler_output, time.monotonic())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler_hooks.workers_said(connector_output, time.monotonic())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, object] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],  # noqa: ARG002  # vLLM's signature
    ) -> tuple[bool, dict[str, object] | None]:
        keeps_blocks, said = self._scheduler_hooks.finish(RequestId(request.request_id), time.monotonic())
        return keeps_blocks, with_whole(request, said)

    # Worker processes. All but ``register_kv_caches`` and ``shutdown`` are called by the forward thread.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        facts, layers = self._facts, own_layers(self._kv_cache_config, self._in_axes(kv_caches))
        memory = read_memory(facts, self._vllm_config, self._kv_cache_config, layers)
        spans = TransferSpans(facts.engine_id, memory.layout.rank)
        if facts.role is Role.PREFILL:
            tokens = read_token_memory(facts, memory, self._kv_cache_config, layers)
            prefill_rank = make_prefill_rank(facts, memory, tokens, adapters=self._adapters, tell=spans.tell)
            self._worker_hooks = PrefillWorkerHooks(prefill_rank, spans)
            ask_before_writes(self.handle_preemptions)
        else:
            decode_rank = make_decode_rank(facts, memory, adapters=self._adapters, tell=spans.tell)
            self._worker_hooks = DecodeWorkerHooks(decode_rank, page_tokens_of(memory.layout, facts.groups), spans)

    def _in_axes(self, kv_caches: Mapping[str, LayerKv]) -> Mapping[str, LayerKv]:
        if RELEASE.names_layouts:
            return kv_caches
        return in_new_axes(self._vllm_config.compilation_config.static_forward_context, kv_caches)

    def get_handshake_metadata(self) -> Listening | None:
        return self._worker_hooks.listening

    def handle_preemptions(self, kv_connector_metadata: base.KVConnectorMetadata) -> None:
        self._worker_hooks.protect_preempted(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker_hooks.begin_step(connector_metadata)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002  # vLLM's signature
        attn_metadata: object,  # noqa: ARG002  # vLLM's signature
        **kwargs: object,  # noqa: ARG002  # vLLM's signature
    ) -> None:
        self._worker_hooks.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        self._worker_hooks.end_step()

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Nothing to start: prefill pushes."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only when all of its KV is here."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        results, receipts = base.KVConnectorTransferResults(), self._worker_hooks.receipts()
        results.finished_sending = self._worker_hooks.sent(finished_req_ids)
        results.finished_recving, results.failed_recving = receipts.ended, receipts.failed
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[RequestId], set[RequestId]]:
        """vLLM before 0.30 calls this method, and then ``get_block_ids_with_load_errors``."""
        return self._worker_hooks.sent(finished_req_ids), self._worker_hooks.receipts().ended

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker_hooks.load_errors()

    def build_connector_worker_meta(self) -> LostAttempts | None:
        losses = self._worker_hooks.losses()
        return LostAttempts(losses) if losses else None

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
        ask_no_more(self.handle_preemptions)
        if self._adapters is not None:
            unwatch(self._adapters)
        adapters = () if self._adapters is None else (self._adapters,)
        end_parts((*self._scheduler_hooks.parts, *self._worker_hooks.parts, *adapters))
