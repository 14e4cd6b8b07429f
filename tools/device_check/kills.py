"""Kills engines of a running pool under load. Each request must end, blocks must come back, next answers must be right.

Also has the figures of the pushes, from the engines' trace files.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from operator import sub
from pathlib import Path
from typing import Final, Protocol

import msgspec
from tools.device_check.asking import Answer, answer_of, end_of, metric

from pdcluster_cli.local.pool import PoolProcess
from pdcluster_protocol.trace import PushTrace

AT_ONCE: Final = 8
TOKENS: Final = 64
"""Tokens of each answer under load."""
KILL_AFTER_S: Final = 0.35
END_S: Final = 60.0
FREE_S: Final = 20.0
_IN_USE: Final = "vllm:kv_cache_usage_perc"


class Pool(Protocol):
    """The running pool."""

    @property
    def front(self) -> int: ...
    @property
    def members(self) -> Mapping[str, PoolProcess]: ...


def kill_each(pool: Pool, prompts: Sequence[list[int]], answers: Sequence[Answer]) -> bool:
    """Kill one engine of each role under load, prefill first. Returns whether all was well. Prints lines."""
    fine = [_kill(pool, f"{role}-{number}", prompts, answers) for role, number in (("prefill", 0), ("decode", 2))]
    return all(fine) and _blocks_come_back(pool, ("prefill-1", "decode-3"))


def _kill(pool: Pool, name: str, prompts: Sequence[list[int]], answers: Sequence[Answer]) -> bool:
    """Kill the engine ``name`` under load. ``answers``: the pool's to ``prompts``, one by one."""
    longest = sorted(prompts, key=len)[-AT_ONCE:]
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        asked = [threads.submit(end_of, pool.front, [7, *prompt[1:]], TOKENS) for prompt in longest]
        time.sleep(KILL_AFTER_S)
        pool.members[name].handle.signal(signal.SIGKILL)
        ends = Counter(one.result() for one in asked)
    took_s = time.monotonic() - began
    wrong = [len(one) for one, right in list(zip(prompts, answers, strict=True))[-4:] if _tried(pool, one) != right]
    told = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    print(f"{name} killed under {AT_ONCE} requests: {told}, all after {took_s:.1f} s; next answers wrong: {wrong or 0}")
    return took_s < END_S and not wrong and not {"torn", "TimeoutError"} & set(ends)


def _tried(pool: Pool, prompt: list[int]) -> Answer | str:
    """The answer. Tries three times, because requests to the dead engine still fail; then "none"."""
    for _ in range(3):
        try:
            return answer_of(pool.front, prompt)
        except OSError as error:
            print(f"one more error after the kill: {error}")
    return "none"


def _blocks_come_back(pool: Pool, names: Sequence[str]) -> bool:
    began = time.monotonic()
    used = dict.fromkeys(names, 1.0)
    while any(used.values()) and time.monotonic() - began < FREE_S:
        used = {name: metric(pool.members[name].port, _IN_USE) for name in names}
        time.sleep(0.2)
    print(f"KV cache in use afterwards: {used}, after {time.monotonic() - began:.1f} s")
    return not any(used.values())


def push_figures(logs: Path) -> str:
    """Medians over the pushes that were alone, a line for each prompt length. The last line counts all pushes."""
    found = pushes(logs)
    done = [push for push in found if push.outcome == "done" and push.layers]
    alone = without_others(done)
    lengths = sorted({push.prompt_tokens for push in alone})
    rows = [_figures(length, [push for push in alone if push.prompt_tokens == length]) for length in lengths]
    compared = sum(push.is_content_compared for push in done)
    return "\n".join([*rows, f"{len(done)} of {len(found)} pushes done, content of {compared} compared and equal"])


def all_pushed(logs: Path, num_asked: int) -> bool:
    """Whether there were ``num_asked`` pushes or more, and all of them were done, with equal content."""
    found = pushes(logs)
    return len(found) >= num_asked and all(push.outcome == "done" and push.is_content_compared for push in found)


def pushes(logs: Path) -> list[PushTrace]:
    """All pushes that have ended, from the traces of prefill's engines below ``logs``."""
    lines = (line for path in sorted(logs.glob("prefill-*.trace")) for line in path.read_text().splitlines())
    return [msgspec.json.decode(line, type=PushTrace) for line in lines]


def without_others(pushes: Sequence[PushTrace]) -> list[PushTrace]:
    """The pushes during which no other push was under way on any prefill engine of this machine."""
    spans = sorted((push.forward_begin or 0.0, _last(push), number) for number, push in enumerate(pushes))
    found, ended = list[PushTrace](), 0.0
    for (begin, end, number), (next_begin, _, _) in zip(spans, [*spans[1:], (inf, inf, 0)], strict=False):
        if ended <= begin and end <= next_begin:
            found.append(pushes[number])
        ended = max(ended, end)
    return found


def _hidden(push: PushTrace) -> float:
    """The share of the bytes that were acknowledged before the pass ended."""
    end = push.forward_end or 0.0
    return sum(layer.num_bytes for layer in push.layers if layer.acked_at <= end) / max(1, push.num_bytes)


def _last(push: PushTrace) -> float:
    """The moment at which the last byte was acknowledged."""
    return max(layer.acked_at for layer in push.layers)


def _figures(length: int, pushes: Sequence[PushTrace]) -> str:
    begins, ends = ([getattr(push, name) or 0.0 for push in pushes] for name in ("forward_begin", "forward_end"))
    lasts = list(map(_last, pushes))
    forward, late = (1e3 * statistics.median(map(sub, *pair)) for pair in ((ends, begins), (lasts, ends)))
    mib = pushes[0].num_bytes / (1 << 20)
    speed = mib / max(1e-6, statistics.median(map(sub, lasts, begins)))
    hidden = 100 * statistics.median(map(_hidden, pushes))
    took = f"pass {forward:.0f} ms, last byte {late:.1f} ms after, {speed:.0f} MiB/s, {hidden:.0f} % before its end"
    return f"{length} tokens, {len(pushes)} pushes: {took}"
