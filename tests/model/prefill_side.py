"""One prefill engine: the jobs that the router gave it, and the real ``SourceHolds`` of each of its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from model.link import Output
from model.plan import Plan
from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.core.source_hold import SourceHolds
from pdcluster_protocol.ids import RequestId

ORDERED: Final = "ordered"
RUNNING: Final = "running"
ABORTING: Final = "aborting"
"""The router has hung up while the prompt was computed."""
COMPUTED: Final = "computed"
"""The prompt is computed; the answer has not reached the router."""
FAILED: Final = "failed"
"""It failed; the router does not know yet."""


@dataclass(slots=True)
class PrefillSide:
    """Scheduler and forward threads of one engine."""

    number: int
    holds: dict[int, SourceHolds[int]]
    jobs: dict[PushKey, str] = field(default_factory=dict)
    targets: dict[PushKey, str] = field(default_factory=dict)
    """The life of decode that each job is for."""
    freed: set[tuple[int, PushKey]] = field(default_factory=set)
    """(rank, job) whose source blocks vLLM may give away, or has."""
    is_held: set[tuple[int, PushKey]] = field(default_factory=set)

    def order(self, key: PushKey, decode_boot_id: str) -> tuple[Output, ...]:
        self.jobs[key], self.targets[key] = ORDERED, decode_boot_id
        return ()

    def begin(self, plan: Plan, key: PushKey) -> tuple[Output, ...]:
        """The forward pass starts; every lane gets its push."""
        self.jobs[key] = RUNNING
        for rank, holds in self.holds.items():
            holds.begin(_id(key), {d for p, d in plan.pairs if p == rank})
            self.is_held.add((rank, key))
        return (("begin", key, self.targets.pop(key)),)

    def complete(self, key: PushKey) -> tuple[Output, ...]:
        """The forward pass is over, and vLLM would free the blocks."""
        self.jobs[key] = COMPUTED
        return (("complete", key), *self._finish(key))

    def fail(self, key: PushKey) -> tuple[Output, ...]:
        """vLLM fails the request; the router gets a 500."""
        state, self.jobs[key] = self.jobs[key], FAILED
        self.targets.pop(key, None)
        return (("give_up", key), *self._finish(key)) if state == RUNNING else ()

    def abort(self, key: PushKey) -> tuple[Output, ...]:
        """The router has hung up."""
        if self.jobs.get(key) == RUNNING:
            self.jobs[key] = ABORTING
        else:
            self.jobs.pop(key, None)
            self.targets.pop(key, None)
        return ()

    def aborted(self, key: PushKey) -> tuple[Output, ...]:
        """vLLM has noticed that the router hung up."""
        del self.jobs[key]
        return (("give_up", key), *self._finish(key))

    def replied(self, key: PushKey) -> tuple[Output, ...]:
        """The answer has reached the router."""
        return (("prefilled", key, self.jobs.pop(key) == COMPUTED),)

    def released(self, rank: int, decode_rank: int, key: PushKey) -> tuple[Output, ...]:
        self.holds[rank].released(_id(key), decode_rank)
        return self._free(rank)

    def crash(self, plan: Plan) -> tuple[Output, ...]:
        """Calls of the router break; memory is gone, and so is every hold."""
        self.holds = _new_holds(plan)
        self.freed, self.is_held, self.targets = set(), set(), {}
        self.jobs = {key: FAILED for key, state in self.jobs.items() if state != ABORTING}
        return ()

    def _finish(self, key: PushKey) -> tuple[Output, ...]:
        out: tuple[Output, ...] = ()
        for rank, holds in self.holds.items():
            holds.finish(_id(key))
            out += self._free(rank)
        return out

    def _free(self, rank: int) -> tuple[Output, ...]:
        free = self.holds[rank].take_free()
        keys = {key for held, key in self.is_held if held == rank and _id(key) in free}
        self.freed |= {(rank, key) for key in keys}
        self.is_held -= {(rank, key) for key in keys}
        return tuple(("forget", rank, key) for key in sorted(keys))


def make_prefill_side(plan: Plan, number: int) -> PrefillSide:
    return PrefillSide(number, _new_holds(plan))


def _new_holds(plan: Plan) -> dict[int, SourceHolds[int]]:
    return {rank: plan.cores.holds() for rank in range(plan.prefill_ranks)}


def _id(key: PushKey) -> RequestId:
    return RequestId(f"{key.transfer_id}.{key.attempt}")
