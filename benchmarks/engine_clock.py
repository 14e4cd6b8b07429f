"""How long an engine worked on a prompt, by its own clock.

Source of truth: vLLM 0.32 ``v1/metrics/stats.py``: ``vllm:request_prefill_time_seconds`` is the time from a request's
first schedule to its first token, observed when the request ends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.client import BenchmarkError, Server, get_text

_METRIC: Final = "vllm:request_prefill_time_seconds"
_LOOK_EVERY_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Of all requests since the engine's start."""

    num_requests: int
    seconds: float


def parse_prefill_times(text: str) -> PrefillTimes:
    """From an engine's metrics page. Nothing observed yet is nothing."""
    return PrefillTimes(int(_total(text, "count")), _total(text, "sum"))


def prefill_seconds(engine: Server, ask: Callable[[], object], *, reported_within_s: float = 10.0) -> float:
    """What the engine needed for the one request that ``ask`` makes. Nobody else may ask meanwhile. Waits.

    Raises:
        BenchmarkError: The engine reported not one request within ``reported_within_s`` after it.
    """
    before = parse_prefill_times(get_text(engine, "/metrics"))
    ask()
    give_up_at = time.monotonic() + reported_within_s
    while time.monotonic() < give_up_at:
        after = parse_prefill_times(get_text(engine, "/metrics"))
        if after.num_requests == before.num_requests + 1:
            return after.seconds - before.seconds
        time.sleep(_LOOK_EVERY_S)
    raise BenchmarkError(
        f"{engine.host}:{engine.port} reported {after.num_requests - before.num_requests} requests, not 1"
    )


def _total(text: str, of: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{_METRIC}_{of}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
