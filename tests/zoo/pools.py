"""Pools of unequal engines for the support matrix, and what must hold after each of their answers.

Engines are started once; a pair (one prefill engine, one decode engine) gets a router of its own over them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from integration.harness import BASE_ARGS, Harness, Server, blocks_in_use, complete_all, eventually
from pdcluster_cli.processes.engines import EnginePlan, PoolRole
from pdcluster_cli.processes.parallelism import ParallelSizes
from zoo.weights import Recipe, ensure_model

MAX_TOKENS: Final = 5
CHUNK: Final = 512
"""Tokens of a step: longer prompts are computed in chunks."""
LENGTHS: Final = (40, 128, 129, 300, 700)
"""Shorter than a block of 128, exactly one, one token more, several, several chunks."""
_ZOO_ARGS: Final = (*BASE_ARGS, "--max-num-seqs", "8")
_CHUNK_ARGS: Final = ("--max-num-batched-tokens", str(CHUNK))


FULL_ROUNDING: Final = 1e-3
"""Log probability by which float32 engines of other splits differ, with a wide reserve: sums in another order."""
REDUCED_ROUNDING: Final = 0.1
"""The same where values or KV are rounded to bfloat16 or fp8: one that lies between two neighbours goes either way."""
_FP8: Final = ("fp8", "fp8_e5m2")
_REDUCED: Final = ("bfloat16", *_FP8)
HAS_FP8: Final = any(flag in Path("/proc/cpuinfo").read_text() for flag in (" avx512f ", " amx_tile "))
"""Whether vLLM's CPU engine takes KV of fp8 on this processor. Elsewhere it ends at its start."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How one engine is split, and what else it is told."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    args: tuple[str, ...] = ()

    @property
    def guesses(self) -> bool:
        """By a draft model: prompt lookup finds nothing to guess from in prompts drawn by chance."""
        return "--speculative-config" in self.args and "ngram" not in " ".join(self.args)

    @property
    def parallelism(self) -> ParallelSizes:
        return ParallelSizes(self.tp, self.pp, self.dp)


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
    """Log probability by which kernels of prefill and decode differ, whatever the splits."""

    @property
    def is_reduced(self) -> bool:
        """Values or KV have fewer bits than float32: engines of other splits round them otherwise."""
        return any(word in _REDUCED for word in self.args)

    @property
    def runs_here(self) -> bool:
        return HAS_FP8 or not any(word in _FP8 for word in self.args)

    @property
    def reference(self) -> Shape:
        """How the single engine is split. With fewer bits as decode, which computes every token but the first steps."""
        return self.decode if self.is_reduced else ONE

    def rounding(self, prefill: Shape, decode: Shape) -> float:
        """Log probability by which these engines may differ from the reference. A choice that is closer decides
        nothing: either token is right."""
        if prefill == decode == self.reference:
            return self.doubt
        return max(self.doubt, REDUCED_ROUNDING if self.is_reduced else FULL_ROUNDING)

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
    replies = complete_all(url, prompts, MAX_TOKENS, concurrency=concurrency, ignore_eos=True)
    return [reply.token_ids for reply in replies]


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """What a single engine says to a prompt. ``margins``: how far each choice was from the next best token."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]

    def is_clear(self, rounding: float) -> bool:
        """No choice was closer than that."""
        return min(self.margins) >= rounding


def wrong(said: Sequence[Said], answers: Sequence[tuple[int, ...]], rounding: float) -> list[str]:
    """Answers that are not the reference's, and no close choice explains it; a text for each.

    Compared up to the first token that differs: what follows answers another text.
    """
    found = []
    for one, answer in zip(said, answers, strict=True):
        step = next((i for i, both in enumerate(zip(one.token_ids, answer, strict=True)) if both[0] != both[1]), None)
        if step is not None and one.margins[step] >= rounding:
            found.append(
                f"prompt of {len(one.prompt)} tokens: {answer}, the reference says {one.token_ids}; "
                f"margin {one.margins[step]:.4f} at token {step}, rounding {rounding}"
            )
    return found


def ask_single(harness: Harness, case: Case, prompts: Sequence[Sequence[int]]) -> list[Said]:
    """What one plain engine without a connector says."""
    model, split = ensure_model(case.recipe), case.reference.parallelism
    with harness.single_engine(case.common(), model=model, parallelism=split) as engine:
        replies = complete_all(
            engine.url, prompts, MAX_TOKENS, concurrency=case.concurrency, ignore_eos=True,
            logprobs=2, return_tokens_as_token_ids=True,
        )  # fmt: skip
    return [
        Said(tuple(prompt), reply.token_ids, _margins(reply.reply["choices"][0]["logprobs"]["top_logprobs"]))
        for prompt, reply in zip(prompts, replies, strict=True)
    ]


def _margins(steps: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """The distance between the best and the second best token of each step."""
    ordered = [sorted(step.values(), reverse=True) for step in steps]
    return tuple(best - second for best, second, *_ in ordered)


def plan_engine(harness: Harness, role: PoolRole, case: Case, shape: Shape) -> EnginePlan:
    """An engine of the case, split as ``shape`` says."""
    plan, args = harness.plan(role), (*case.common(), *shape.args)
    return dataclasses.replace(plan, model=ensure_model(case.recipe), args=args, parallelism=shape.parallelism)


@contextmanager
def engines(
    harness: Harness, case: Case, prefills: Sequence[Shape], decodes: Sequence[Shape]
) -> Iterator[tuple[tuple[Server, ...], tuple[Server, ...]]]:
    """Prefill engines and decode engines, all ready; afterwards none of them holds a block."""
    plans = [plan_engine(harness, PoolRole.PREFILL, case, shape) for shape in prefills]
    plans += [plan_engine(harness, PoolRole.DECODE, case, shape) for shape in decodes]
    with harness.start(*plans) as servers:
        yield servers[: len(prefills)], servers[len(prefills) :]
        require_no_block_in_use(servers)


def require_pushed(prefill: Server, decode: Server, seen: int, at_least: int) -> None:
    """Since the decode engine's first ``seen`` receipts, so many came, and every one was a success.

    The load failure policy is ``fail``, so nothing was recomputed either.
    """
    receipts = decode.read_trace("receive", seen + at_least)[seen:]
    assert [line for line in receipts if line["outcome"] != "received"] == []
    pushes = prefill.read_trace("push", 1)
    assert [line for line in pushes if line["outcome"] != "done"] == []
    assert sum(line["num_bytes"] for line in pushes) > 0


def require_no_block_in_use(servers: Sequence[Server]) -> None:
    assert eventually(lambda: blocks_in_use(*servers) == 0), [(one.name, blocks_in_use(one)) for one in servers]
