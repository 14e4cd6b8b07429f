"""Which plans are walked: a small set within a minute, a large one by hand or once a night."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Final

from model.plan import FAULT_NAMES, Faults, Plan

HEALED: Final = ("write", "prefill_fails", "prefill_late", "crash_prefill", "repeat", "reorder", "spoil")
"""Faults that a second push or another attempt makes good: the KV must come all the same."""
PROMPT: Final = (*HEALED, "crash_router", "cut_call", "cancel", "idle")
"""Faults after which nobody has to wait for a deadline."""


_RANKS: Final = (Plan("prefill ranks", 2, 1), Plan("decode ranks", 1, 2), Plan("ranks", 2, 2))


def one(name: str) -> Faults:
    """The fault of this name, once."""
    return Faults(**{name: 1})


def pairs() -> Iterator[Faults]:
    """Every two faults but ``idle`` and ``spoil``, also twice the same."""
    names = [name for name in FAULT_NAMES if name not in ("idle", "spoil")]
    for first, second in combinations_with_replacement(names, 2):
        yield Faults(**({first: 2} if first == second else {first: 1, second: 1}))


def single(plan: Plan) -> Iterator[Plan]:
    """``plan`` with each fault once, and with all that this fault must not spoil."""
    for name in FAULT_NAMES:
        if name == "spoil" and not plan.compares:
            continue
        yield replace(plan, must_receive=name in HEALED, is_prompt=name in PROMPT, faults=one(name))


def small() -> Iterator[Plan]:
    """Under a minute."""
    yield from (Plan("pairs", faults=faults) for faults in pairs())
    yield from single(Plan("blocks over time", requests=2))
    side_by_side = Plan("side by side", requests=2, are_together=True)
    yield from (replace(side_by_side, is_prompt=True, faults=one(name)) for name in ("repeat", "reorder", "cancel"))
    yield from _light(Plan("prefill ranks", 2, 1))
    yield from _light(Plan("decode ranks", 1, 2))
    alone = single(Plan("fails at once", engines=1, recomputes=False))
    yield from (replace(plan, must_receive=False) for plan in alone)
    yield from _of_shared_sessions()
    yield Plan("three attempts", engines=3, must_receive=True, is_prompt=True, faults=Faults(write=1, prefill_fails=1))
    yield from _compared()
    yield Plan("all pairs", 2, 2, all_pairs=True)
    yield Plan("write by write", writes=2, is_lazy=True, faults=Faults(write=1, early=1))


def _light(plan: Plan) -> Iterator[Plan]:
    """Those of ``single`` that have few states."""
    return (made for made in single(plan) if made.faults in map(one, ("repeat", "reorder", "lose", "write", "cancel")))


def _of_shared_sessions() -> Iterator[Plan]:
    """Those in which a session may be cut that two prefill engines use."""
    shared = Plan("shared session", requests=2, shares_session=True)
    yield from (replace(shared, faults=one(name)) for name in ("write", "crash_prefill", "prefill_late", "early"))


def _compared() -> Iterator[Plan]:
    """Content is compared: alone, and with what is wrong of it pushed again while something else goes wrong."""
    plan = Plan("compared", compares=True)
    yield from single(plan)
    yield replace(plan, must_receive=True, is_prompt=True, faults=Faults(spoil=2))
    for name in FAULT_NAMES:
        if name not in ("idle", "spoil"):
            yield replace(plan, name="pushed again", faults=replace(one(name), spoil=1))
    for ranks in ((2, 1), (1, 2)):
        yield Plan("pushed again", *ranks, compares=True, must_receive=True, is_prompt=True, faults=one("spoil"))
    yield Plan("pushed again", writes=2, is_lazy=True, compares=True, faults=Faults(spoil=1, early=1))


def _is_harsh(faults: Faults) -> bool:
    """Whether a party dies or a write goes wrong: what another request's blocks must not feel."""
    return bool(faults.write or faults.crash_prefill or faults.crash_decode)


def large() -> Iterator[Plan]:
    """About a quarter of an hour on two free cores. ``idle`` has too many states for more than 1 x 1 ranks."""
    yield from small()
    yield from (Plan("pairs over time", requests=2, faults=faults) for faults in pairs() if _is_harsh(faults))
    yield from (Plan("idle", faults=replace(one(name), idle=1)) for name in FAULT_NAMES if name != "idle")
    for plan in (Plan("side by side", requests=2, are_together=True), *_RANKS):
        yield from (made for made in single(plan) if not made.faults.idle)
    yield Plan("all pairs", 2, 2, all_pairs=True, faults=Faults(repeat=1))
    yield Plan("all pairs", 2, 2, all_pairs=True, faults=Faults(lose=1))


SCOPES: Final = {"small": small, "large": large}
