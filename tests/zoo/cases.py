"""The pools of the support matrix, by name: a model, its options and how each side is split."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

from zoo import models
from zoo.pools import LENGTHS, ONE, Case, Shape
from zoo.weights import Recipe, ensure_model

_NO_CACHE: Final = ("--no-enable-prefix-caching",)
_BF16: Final = ("--dtype", "bfloat16")
TP2: Final = Shape(tp=2)


def speculative(**config: object) -> tuple[str, ...]:
    return ("--speculative-config", json.dumps(config))


def draft_model(recipe: Recipe = models.DRAFT) -> tuple[str, ...]:
    return speculative(method="draft_model", model=str(ensure_model(recipe)), num_speculative_tokens=3)


def eagle() -> tuple[str, ...]:
    return speculative(method="eagle", model=str(ensure_model(models.EAGLE)), num_speculative_tokens=3)


NGRAM: Final = speculative(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=4)
MTP: Final = speculative(method="mtp", num_speculative_tokens=1)


def _delta_net(prefill: Shape = ONE, decode: Shape = ONE) -> Case:
    """Prompts of some blocks and one token: a pool and a single engine then cut them into the same steps.

    The CPU kernel knows bfloat16 only, and computes a chunk otherwise than its tokens one by one: other cuts give other
    answers, with or without a pool. Prefill leaves the last token to decode, as a state cannot go back.
    Of other splits roundings of bfloat16 come together in a state: logits are 0.06 apart, and choices by 0.19 turned.
    """
    times, doubt = (1, 0.0) if prefill == decode else (4, 0.25)
    lengths = (129, 385, 769) * times
    return Case(models.QWEN3_NEXT, _BF16, prefill, decode, lengths, more=384, concurrency=1, doubt=doubt)


def _delta_net_without_cache(more_args: tuple[str, ...] = ()) -> Case:
    """The same with steps of 199 tokens: without prefix caching nothing is cut at blocks."""
    args = (*_BF16, *_NO_CACHE, "--max-num-batched-tokens", "199", *more_args)
    return Case(models.QWEN3_NEXT, args, lengths=(200, 399, 598), more=199, concurrency=1)


_CPU_MLA: Final = ("--attention-backend", "CPU_MLA")
"""On a CPU with AMX vLLM 0.32 takes another backend by itself, and that one ends an engine of float32."""
_MLA_MTP: Final = speculative(method="mtp", num_speculative_tokens=1, attention_backend="CPU_MLA")
"""A draft model has a backend of its own."""


def _mla(args: tuple[str, ...] = (), prefill: Shape = ONE, decode: Shape = ONE) -> Case:
    """CPU kernels take no chunks, answer otherwise beside other requests, and differ by 0.03 from prefill to decode."""
    return Case(
        models.DEEPSEEK,
        (*_CPU_MLA, *args),
        prefill,
        decode,
        lengths=LENGTHS * 2,
        is_chunked=False,
        concurrency=1,
        doubt=0.1,
    )


_LLAMA: Final = models.llama(4)
_FEW_BLOCKS: Final = ("--max-model-len", "1024", "--num-gpu-blocks-override", "12")
"""Requests get blocks in which others have left KV: a draft model on decode alone reads it. The model that is its own
draft model guesses rightly now and then all the same."""
CASES: Final[Mapping[str, Callable[[], Case]]] = {
    "mistral": lambda: Case(models.MISTRAL),
    "mistral 2 to 1": lambda: Case(models.MISTRAL, prefill=TP2),
    "gemma2 1 to 2": lambda: Case(models.GEMMA2, decode=TP2),
    "gemma3": lambda: Case(models.GEMMA3),
    "gemma3 2 to 1": lambda: Case(models.GEMMA3, prefill=TP2),
    "gemma3 pipeline 2 to 1": lambda: Case(models.GEMMA3_SPLIT, prefill=Shape(pp=2)),
    "gemma3n 1 to 2": lambda: Case(models.GEMMA3N, decode=TP2),
    "mixtral 1 to 2": lambda: Case(models.MIXTRAL, decode=TP2),
    "qwen3-moe 2 to 1": lambda: Case(models.QWEN3_MOE, prefill=TP2),
    "mla": lambda: _mla(),
    "mla 2 to 1": lambda: _mla(prefill=TP2),
    "mla 1 to 2": lambda: _mla(decode=TP2),
    "mla 2 to 2": lambda: _mla(prefill=TP2, decode=TP2),
    "delta net": lambda: _delta_net(),
    "delta net without cache": lambda: _delta_net_without_cache(),
    "delta net 2 to 2": lambda: _delta_net(TP2, TP2),
    "delta net 2 to 1": lambda: _delta_net(TP2, ONE),
    "delta net 1 to 2": lambda: _delta_net(ONE, TP2),
    "mamba2": lambda: Case(models.MAMBA2),
    "mamba2 2 to 1": lambda: Case(models.MAMBA2, prefill=TP2),
    "mamba2 1 to 2": lambda: Case(models.MAMBA2, decode=TP2),
    "mamba2 2 to 2": lambda: Case(models.MAMBA2, prefill=TP2, decode=TP2),
    "ngram": lambda: Case(_LLAMA, NGRAM),
    "ngram on decode alone": lambda: Case(_LLAMA, decode=Shape(args=NGRAM)),
    "draft model": lambda: Case(_LLAMA, draft_model()),
    "draft model 1 to 2": lambda: Case(_LLAMA, draft_model(), decode=TP2),
    "draft model on decode alone": lambda: Case(
        _LLAMA, _FEW_BLOCKS, decode=Shape(args=draft_model(_LLAMA)), concurrency=2
    ),
    "draft model on decode alone 1 to 2": lambda: Case(_LLAMA, decode=Shape(tp=2, args=draft_model())),
    "eagle": lambda: Case(_LLAMA, eagle()),
    "eagle on decode alone": lambda: Case(_LLAMA, decode=Shape(args=eagle())),
    "eagle on decode alone, pipeline 2 to 1": lambda: Case(_LLAMA, prefill=Shape(pp=2), decode=Shape(args=eagle())),
    "mtp": lambda: _mla(_MLA_MTP),
    "mtp on decode alone": lambda: _mla(decode=Shape(args=_MLA_MTP)),
    "mtp on decode alone 1 to 2": lambda: _mla(decode=Shape(tp=2, args=_MLA_MTP)),
    "fp8": lambda: Case(_LLAMA, ("--kv-cache-dtype", "fp8")),
    "fp8 2 to 1": lambda: Case(_LLAMA, ("--kv-cache-dtype", "fp8_e5m2"), prefill=TP2),
    "block 32": lambda: Case(_LLAMA, ("--block-size", "32")),
    "pipeline 2 to 1": lambda: Case(_LLAMA, prefill=Shape(pp=2)),
    "pipeline 2 to tp 2": lambda: Case(_LLAMA, prefill=Shape(pp=2), decode=TP2),
    "pipeline 2 to 2": lambda: Case(_LLAMA, prefill=Shape(pp=2), decode=Shape(pp=2)),
    "data parallel prefill": lambda: Case(_LLAMA, prefill=Shape(dp=2)),
    "data parallel decode": lambda: Case(_LLAMA, decode=Shape(dp=2)),
    "tp 4 to data parallel 2 of tp 2": lambda: Case(_LLAMA, prefill=Shape(tp=4), decode=Shape(tp=2, dp=2)),
    "no cache": lambda: Case(_LLAMA, _NO_CACHE),
}
"""Made when asked for: a draft model must be in the cache before its path is known."""
