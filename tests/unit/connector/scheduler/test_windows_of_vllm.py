"""vLLM's own block manager: what decode's first token reads is in blocks of the request, for any length of prompt."""

from __future__ import annotations

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from pdcluster_connector.core.ranges import NULL_BLOCK
from pdcluster_connector.core.watermark import num_kept_back
from pdcluster_connector.vllm.facts import _group

BLOCK, WINDOW, CHUNK, LONGEST = 16, 33, 48, 130
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=WINDOW)
CHUNKED = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=CHUNK)


def blocks_for(spec: KVCacheSpec, num_tokens: int, num_external: int) -> list[int]:
    """Decode's block table when a push brings ``num_external`` of a prompt's tokens."""
    cache = KVCacheConfig(LONGEST, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(
        cache, max_model_len=4096, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=False
    )
    request = Request("r", list(range(num_tokens)), SamplingParams(max_tokens=1), None)
    manager.allocate_slots(request, 0, num_external_computed_tokens=num_external, delay_cache_blocks=True)
    (blocks,) = manager.get_block_ids("r")
    return list(blocks)


def first_read(spec: KVCacheSpec, position: int) -> int:
    """The first position that the token at ``position`` reads."""
    return position // CHUNK * CHUNK if spec is CHUNKED else max(0, position - WINDOW + 1)


def lacks_a_block(spec: KVCacheSpec, num_tokens: int, num_external: int) -> bool:
    """Whether the last prompt token, which decode computes, reads a block that vLLM has taken away."""
    blocks = blocks_for(spec, num_tokens, num_external)
    first = first_read(spec, num_tokens - 1) // BLOCK
    return NULL_BLOCK in blocks[first : -(-num_tokens // BLOCK)]


@pytest.mark.parametrize("spec", [SLIDING, CHUNKED], ids=["sliding", "chunked"])
def test_the_last_prompt_token_reads_no_block_that_was_taken_away(spec: KVCacheSpec) -> None:
    kept_back = num_kept_back([_group(KVCacheGroupSpec(["layer"], spec))])
    lengths = range(2, LONGEST)
    assert [n for n in lengths if lacks_a_block(spec, n, n - kept_back)] == []
    assert [n for n in lengths if lacks_a_block(spec, n, n)], "vLLM no longer needs this"
