"""Walks every interleaving of a small system of the real cores and prints what it has seen.

    python -m tests.model [small|large] [--max-states N] [--jobs N]

What takes part: ``Pairing`` and the metaserver's ``ReservationCalls`` of the router, ``DecodeScheduler`` and a
``Reception`` for each decode rank, a ``Push`` for each lane and attempt, ``SourceHolds`` for each prefill rank. The
threads, sockets and transports between them are a few lines each (``link.py``, ``decode_side.py``, ``prefill_side.py``,
``router_side.py``).
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import resource
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest's ``pythonpath``

from model.plan import Plan
from model.scopes import SCOPES
from model.walk import BrokenAt, Figures, Walk

REDUCTIONS = """How the space was kept small, and what that leaves out:
  time        No numbers: a timer may pass as soon as it is set. In the course of things it passes only when nothing
              else can happen, deadlines after all others; that one passes earlier is the fault `early`. Renewals of
              leases are left out: a lease may lapse at any moment anyhow.
  landing     A write that may land is checked as if it landed next, so landing is no step of its own; a write is
              `in the kernel` after its sender died or was cut, until decode closes the session.
  turns       What one thread does in one turn is one step: a bad write and the cut that follows from it, a report of a
              worker and what the scheduler says to it, an engine's first step for all of its ranks.
  writes      All writes of a push are submitted at its grant, but in `write by write`.
  order       Frames of a connection come in order but for the fault `reorder`; calls between engines in any order.
  symmetry    None is used: states that differ by the names of ranks are counted apart.
  faults      Each at most as often as the plan says. Crashes are of whole engines, and of the router; a stopped
              process is one whose steps come late. Decode is not tried again elsewhere (there is one).
  not here    Preemption on prefill (lost pushes), sliding windows, more than one KV group, admission, seals, tokens
              of strangers, pruning of what has ended, the order in which one step's reports reach vLLM.
I6 (the forward thread never waits) is no matter of states: cores have nothing to wait on, import-linter holds that."""


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.model")
    arguments.add_argument("scope", nargs="?", choices=SCOPES, default="large")
    arguments.add_argument("--max-states", type=int, default=12_000_000, help="for each plan; memory: 0.5 KB each")
    arguments.add_argument("--jobs", type=int, default=2, help="plans that are walked at the same time")
    given = arguments.parse_args()
    begun, seen = time.monotonic(), list[Figures]()
    with multiprocessing.Pool(given.jobs, maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(partial(walked, max_states=given.max_states), SCOPES[given.scope]()):
            print(result, flush=True)
            if isinstance(result, str):
                return 1
            seen.append(result)
    print(REDUCTIONS)
    print(_total(seen, time.monotonic() - begun))
    return 0 if all(figures.is_whole for figures in seen) else 2


def walked(plan: Plan, *, max_states: int) -> Figures | str:
    """The figures of one plan, or how a promise is broken in it."""
    logging.disable(logging.CRITICAL)
    try:
        return Walk(plan, max_states=max_states).run()
    except BrokenAt as broken:
        return f"{plan}\n    BROKEN {broken}"


def _total(seen: list[Figures], seconds: float) -> str:
    states, transitions = sum(f.num_states for f in seen), sum(f.num_transitions for f in seen)
    memory_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    whole = sum(figures.is_whole for figures in seen)
    return (
        f"I1-I5 hold: {states:,} states and {transitions:,} transitions in {len(seen)} plans ({whole} of them whole), "
        f"depth up to {max(f.depth for f in seen)}, {seconds:.0f} s, "
        f"{memory_gib:.1f} GiB at most in one process"
    )


if __name__ == "__main__":
    sys.exit(main())
