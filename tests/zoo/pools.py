"""Pools of unequal engines for the support matrix, and what must hold after each of their answers.

Engines are started once; a pair (one prefill engine, one decode engine) gets a router of its own over them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from integration.harness import (
    BASE_ARGS,
    Harness,
    Server,
    complete_all,
    eventually,
    metric,
    parallel_args,
)
from pdcluster_cli.engines import EnginePlan, Role
from zoo.weights import Recipe, ensure_model

MAX_TOKENS: Final = 5
CHUNK: Final = 512
"""Tokens of a step: longer prompts are computed in chunks."""
LENGTHS: Final = (40, 128, 129, 300, 700)
"""Shorter than a block of 128, exactly one, one token more, several, several chunks."""
_ZOO_ARGS: Final = (*BASE_ARGS, "--max-num-seqs", "8")
_CHUNK_ARGS: Final = ("--max-num-batched-tokens", str(CHUNK))


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How one engine is split, and what else it is told."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    args: tuple[str, ...] = ()

    def argv(self) -> tuple[str, ...]:
        return (*parallel_args(self.tp, self.pp, self.dp), *self.args)


ONE: Final = Shape()


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model with the options that both engines and the single engine get."""

    recipe: Recipe
    args: tuple[str, ...] = ()
    prefill: Shape = ONE
    decode: Shape = ONE
    lengths: tuple[int, ...] = LENGTHS
    more: int = 70
    """Tokens by which prompts grow in the second round."""
    is_chunked: bool = True
    concurrency: int = 8
    doubt: float = 0.0
    """Log probability by which kernels of prefill and decode may differ: prompts with a closer choice are left out."""

    def common(self) -> tuple[str, ...]:
        return (*_ZOO_ARGS, *(_CHUNK_ARGS if self.is_chunked else ()), *self.args)


def make_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prompts of these lengths that share no first token block with those of another seed."""
    rng = random.Random(seed)
    return [[rng.randrange(50, 1000) for _ in range(length)] for length in lengths]


def longer(prompts: Sequence[Sequence[int]], more: int) -> list[list[int]]:
    """Each prompt with so many tokens more: a prefix that both sides may have in their caches."""
    rng = random.Random(more)
    return [[*prompt, *(rng.randrange(50, 1000) for _ in range(more))] for prompt in prompts]


def answers(url: str, prompts: Sequence[Sequence[int]], concurrency: int = 8) -> list[tuple[int, ...]]:
    """Greedy, always ``MAX_TOKENS`` of them."""
    replies = complete_all(url, prompts, MAX_TOKENS, concurrency=concurrency, timeout_s=240, ignore_eos=True)
    return [reply.token_ids for reply in replies]


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """What a single engine says to a prompt. ``margin``: how far its closest choice was from the next best token."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    margin: float


def ask_single(harness: Harness, case: Case, prompts: Sequence[Sequence[int]]) -> list[Said]:
    """What one plain engine without a connector says."""
    with harness.single_engine(case.common(), model=ensure_model(case.recipe)) as engine:
        replies = complete_all(
            engine.url, prompts, MAX_TOKENS, concurrency=case.concurrency, ignore_eos=True,
            logprobs=2, return_tokens_as_token_ids=True,
        )  # fmt: skip
    return [
        Said(tuple(prompt), reply.token_ids, _margin(reply.reply["choices"][0]["logprobs"]["top_logprobs"]))
        for prompt, reply in zip(prompts, replies, strict=True)
    ]


def _margin(steps: Sequence[Mapping[str, float]]) -> float:
    """The smallest distance between the best and the second best token of any step."""
    ordered = [sorted(step.values(), reverse=True) for step in steps]
    return min(best - second for best, second, *_ in ordered)


def plan_engine(harness: Harness, role: Role, case: Case, shape: Shape) -> EnginePlan:
    """An engine of the case, split as ``shape`` says."""
    args = (*case.common(), *shape.argv())
    return dataclasses.replace(harness.plan(role), model=ensure_model(case.recipe), args=args)


@contextmanager
def engines(
    harness: Harness, case: Case, prefills: Sequence[Shape], decodes: Sequence[Shape]
) -> Iterator[tuple[tuple[Server, ...], tuple[Server, ...]]]:
    """Prefill engines and decode engines, all ready; afterwards none of them holds a block."""
    plans = [plan_engine(harness, Role.PREFILL, case, shape) for shape in prefills]
    plans += [plan_engine(harness, Role.DECODE, case, shape) for shape in decodes]
    with harness.start(*plans) as servers:
        yield servers[: len(prefills)], servers[len(prefills) :]
        require_no_block_in_use(servers)


def require_pushed(prefill: Server, decode: Server, seen: int, at_least: int) -> None:
    """Since the decode engine's first ``seen`` receipts, so many came, and every one was a success.

    The load failure policy is ``fail``, so nothing was recomputed either.
    """
    receipts = decode.read_trace("receive")[seen:]
    assert [line for line in receipts if line["outcome"] != "received"] == []
    assert len(receipts) >= at_least
    pushes = prefill.read_trace("push")
    assert [line for line in pushes if line["outcome"] != "done"] == []
    assert sum(line["num_bytes"] for line in pushes) > 0


def require_no_block_in_use(servers: Sequence[Server]) -> None:
    def used() -> float:
        return sum(metric(server.url, "vllm:kv_cache_usage_perc") for server in servers)

    assert eventually(lambda: used() == 0, timeout_s=30), [
        (server.name, metric(server.url, "vllm:kv_cache_usage_perc")) for server in servers
    ]
