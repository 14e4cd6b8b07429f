"""Asks a running pool for LoRA adapters and lets one change. Decode must never go on from KV of other weights (0041).

The pool must answer like a single engine with the same weights. Then files of one adapter change: first decode's
engines read them, later prefill's. In between decode must answer with the new weights, and nothing is pushed.

vLLM's kernels for adapters sum partial results by atomic additions, so in no fixed order (``lora_shrink_op.py``). In
bfloat16 even a single engine may not repeat its answers. How many it does not repeat is printed. Ask in float32.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from tools.adapters import RANK, write_adapter
from tools.device_check.asking import ANSWER_S, Answer, answer_of
from tools.device_check.kills import Pool, pushes

from pdcluster_cli.processes.engines import LOOPBACK, PoolRole

ENV: Final = (("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True"),)
BASE: Final = ""
"""Stands for the model without an adapter."""
SERVED: Final = {"sql": 1, "poem": 2, "changed": 3}
"""The seed of each adapter's weights. ``sql`` gets those of ``changed``, for which only the single engine is asked."""


def arguments(logs: Path, model: Path) -> tuple[str, ...]:
    """vLLM's arguments to serve adapters from folders below ``logs``. Writes the adapters."""
    modules = [f"{name}={write_adapter(logs / name, model, seed=seed)}" for name, seed in SERVED.items()]
    room = str(len(SERVED))
    sizes = ("--max-lora-rank", str(RANK), "--max-loras", room, "--max-cpu-loras", room)
    return ("--enable-lora", *sizes, "--lora-modules", *modules)


def change_one(pool: Pool, prompts: Sequence[list[int]], logs: Path, model: Path) -> bool:
    """Ask for each adapter, then let one change. Prints lines. Returns whether all was right."""
    prompts = [prompt for prompt in prompts if len(prompt) > 1]  # decode computes the last token of each
    single = pool.members[PoolRole.SINGLE.value].port
    wanted, again = ({name: _alone(single, name, prompts) for name in (BASE, *SERVED)} for _ in range(2))
    unlike = sum(one != other for name in wanted for one, other in zip(wanted[name], again[name], strict=True))
    print(f"the single engine did not repeat {unlike} of {len(wanted) * len(prompts)} answers", flush=True)
    scene = Scene(pool, logs, prompts, wanted)
    fine = [scene.are_answers_of(name, name, len(prompts), "at first") for name in (BASE, "sql", "poem")]
    write_adapter(logs / "sql", model, seed=SERVED["changed"])
    fine.append(scene.are_answers_of("sql", "sql", len(prompts), "its files have changed"))
    scene.reload(PoolRole.DECODE)
    fine.append(scene.are_answers_of("sql", "changed", 0, "decode has read them"))
    scene.reload(PoolRole.PREFILL)
    fine.append(scene.are_answers_of("sql", "changed", len(prompts), "prefill has read them too"))
    return all(fine)


def _alone(port: int, name: str, prompts: Sequence[list[int]]) -> list[Answer]:
    """A single engine's second answers, for which it computes the last token of a prompt alone, as decode does."""
    return [[answer_of(port, prompt, model=name) for _ in range(2)][-1] for prompt in prompts]


@dataclass(frozen=True, slots=True)
class Scene:
    """A pool whose engines read their adapters from folders below ``logs``. ``wanted``: right answers, by adapter."""

    pool: Pool
    logs: Path
    prompts: Sequence[list[int]]
    wanted: Mapping[str, list[Answer]]

    def are_answers_of(self, name: str, weights: str, num_pushes: int, when: str) -> bool:
        """Ask for ``name``. Returns whether all answers are those of ``weights``, after that many pushes."""
        before = self._num_pushed()
        ours = [answer_of(self.pool.front, prompt, model=name) for prompt in self.prompts]
        pushed = self._num_pushed() - before
        others = {other for other in self.wanted if other != weights}
        assert all(self.wanted[weights] != self.wanted[other] for other in others), "each adapter changes answers"
        differ = [
            len(prompt)
            for prompt, one, right in zip(self.prompts, ours, self.wanted[weights], strict=True)
            if one != right
        ]
        what = f"{name or 'no adapter'}, {when}: answers unlike a single engine's: {differ or 0} of {len(ours)}"
        print(f"{what}; {pushed} pushes done, {num_pushes} expected", flush=True)
        return not differ and pushed == num_pushes

    def reload(self, role: PoolRole) -> None:
        """The engines of ``role`` read the files of ``sql`` anew."""
        body = msgspec.json.encode({"lora_name": "sql", "lora_path": str(self.logs / "sql"), "load_inplace": True})
        for name, member in self.pool.members.items():
            if name.startswith(role.value):
                address = f"http://{LOOPBACK}:{member.port}/v1/load_lora_adapter"
                request = urllib.request.Request(address, body, {"content-type": "application/json"})
                with urllib.request.urlopen(request, timeout=ANSWER_S) as response:  # noqa: S310 - an engine of ours
                    response.read()

    def _num_pushed(self) -> int:
        return sum(push.outcome == "done" for push in pushes(self.logs))
