"""Compares policies on generated traces: use of prefix caches, and how evenly work is spread. No engine, no clock.

    .venv/bin/python -m benchmarks.policies [--seed 1] [--engines 4 16] [--trace agents ...] [--policy affinity ...]

The policies, loads, breakers and bodies are the router's own. ``benchmarks/pool_model.py`` models the engines, and
``benchmarks/traces.py`` makes the traces. Each policy gets the same requests at the same virtual times. The policies of
other routers are in ``benchmarks/peer_policies.py``; our breakers keep them, too, from broken engines.

*hit*: tokens of prompts that were in the engine's prefix cache, in per cent. The oracle is one prefill engine with the
memory of all: no placement hits more. *max/mean*: work of the busiest engine. *wait*: from a request to the end
of its prefill, as a ratio to that of least-tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Final

from benchmarks.peer_policies import PEERS
from benchmarks.pool_model import OurRouter, Pool, Router, Served, oracle_hits
from benchmarks.traces import TRACES, Asked

from pdcluster_protocol.launch import RouterPolicy
from pdcluster_router.core.engines.placement import Chooser, E, Policy, RequestFacts, Tally
from pdcluster_router.services import POLICIES


def by_chance(engines: Sequence[E], _: Tally | None = None, /) -> Chooser[E]:
    """Chooses at random, like a load balancer that knows nothing."""

    def choose(_: RequestFacts, /, *, now: float, chance: Callable[[], float]) -> E:
        return engines[int(chance() * len(engines))]

    return choose


_OURS: Final[dict[str, Policy]] = {"chance": by_chance, **{name.value: POLICIES[name] for name in RouterPolicy}}
_COMPARED: Final[dict[str, Callable[[], Router]]] = {
    **{name: partial(OurRouter, policy) for name, policy in _OURS.items()},
    **PEERS,
}
_BASE: Final = RouterPolicy.LEAST_TOKENS.value


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace. Hits in [0, 1]; waits in seconds."""

    prefill_hit: float
    decode_hit: float
    prefill_balance: float
    decode_balance: float
    mean_wait_s: float
    p99_wait_s: float
    failed: int
    """Requests that were tried at a broken engine."""


def measure(trace: Sequence[Asked], router: Router, num_engines: int, seed: int, *, is_one_broken: bool) -> Row:
    pool = Pool(router, num_engines, random.Random(seed).random, is_one_broken=is_one_broken)
    served = pool.serve(trace)
    waits = sorted(one.wait_s for one in served)
    return Row(
        _hit(served, [one.prefill_hit for one in served]),
        _hit(served, [one.decode_hit for one in served]),
        pool.prefill_balance,
        pool.decode_balance,
        fmean(waits),
        waits[int(0.99 * len(waits))],
        pool.num_failed,
    )


def _hit(served: Sequence[Served], hits: Sequence[int]) -> float:
    return sum(hits) / sum(one.asked.num_tokens for one in served)


def show(name: str, num_engines: int, seed: int, policies: Sequence[str]) -> None:
    trace = TRACES[name](random.Random(seed), num_engines)
    is_one_broken = name == "black-hole"
    print(f"\n{name}: {len(trace)} requests, {num_engines} engines of each role; an oracle hits", end=" ")
    print(f"{100 * oracle_hits(trace, num_engines) / sum(one.num_tokens for one in trace):.1f} %")
    rows = {
        policy_name: measure(trace, _COMPARED[policy_name](), num_engines, seed, is_one_broken=is_one_broken)
        for policy_name in dict.fromkeys((_BASE, *policies))
    }
    print(f"{'policy':<27} prefill hit  decode hit  max/mean p  max/mean d  mean wait  p99 wait  failed")
    base = rows[_BASE]
    for policy_name, row in rows.items():
        print(
            f"{policy_name:<27} {100 * row.prefill_hit:>9.1f} % {100 * row.decode_hit:>9.1f} %"
            f" {row.prefill_balance:>11.2f} {row.decode_balance:>11.2f}"
            f" {row.mean_wait_s / base.mean_wait_s:>10.2f} {row.p99_wait_s / base.p99_wait_s:>9.2f} {row.failed:>7}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, nargs="+", default=[4, 16], help="of each role")
    parser.add_argument("--trace", nargs="+", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--policy", nargs="+", choices=list(_COMPARED), default=list(_COMPARED))
    args = parser.parse_args()
    for name in args.trace:
        for num_engines in args.engines:
            show(name, num_engines, args.seed, args.policy)


if __name__ == "__main__":
    main()
