"""What the choice of an engine costs with 2, 16 and 256 engines, side by side in one run.

    .venv/bin/python -m benchmarks.placement

Microseconds of processor time for one choice: *well* among engines that answer, *failed* among engines that have all
failed a request lately, so that each load must be worked out anew. The cost must not grow with the engines.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Final

from pdcluster_router.core.least_tokens import least_tokens
from pdcluster_router.core.load import Load
from pdcluster_router.core.placement import RequestFacts
from pdcluster_router.core.rewrite import parse_body

NUM_ENGINES: Final = (2, 16, 256)
_NUM_CHOICES: Final = 20_000


@dataclass(slots=True)
class Engine:
    load: Load = field(default_factory=Load)


def cost_us(engines: list[Engine], now: float) -> float:
    """Of one choice, the least of five rounds."""
    rounds, request = [], RequestFacts(b"", b"", parse_body(b"{}"), "")
    for _ in range(5):
        began = time.process_time()
        for _ in range(_NUM_CHOICES):
            least_tokens(engines, request, now=now, chance=random.random)
        rounds.append((time.process_time() - began) / _NUM_CHOICES * 1e6)
    return min(rounds)


def main() -> None:
    print("engines  well us  failed us")
    for number in NUM_ENGINES:
        engines = [Engine(Load(index * 7 % 13, index)) for index in range(number)]
        well = cost_us(engines, 1.0)
        for engine in engines:
            engine.load.add_failed(100, now=0.0)
        print(f"{number:>7} {well:>8.2f} {cost_us(engines, 1.0):>10.2f}")


if __name__ == "__main__":
    main()
