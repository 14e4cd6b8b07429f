"""What a rank still has for requests, which is nothing when every request has ended, and the rank's process.

A vLLM worker extension and its asker.

Counts what belongs to the rank. Blocks belong to the scheduler: vLLM's own metric shows those that are in use.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from integration.harness import post_json

LEFTOVERS: Final = "campaign.leftovers.Leftovers"
"""For ``--worker-extension-cls``."""
_ASK_S: Final = 10.0


def ask_ranks(url: str) -> tuple[Mapping[str, int], ...]:
    """The leftovers of each rank of the engine at ``url``, ascending."""
    return _ask(url, "leftovers")


def ask_pids(url: str) -> tuple[int, ...]:
    """The process of each rank of the engine at ``url``, ascending."""
    return tuple(rank["pid"] for rank in _ask(url, "process"))


def _ask(url: str, method: str) -> tuple[dict[str, int], ...]:
    """vLLM's page makes a string of whatever is neither a list nor a dict."""
    results: list[dict[str, int]] = post_json(f"{url}/collective_rpc", {"method": method}, timeout_s=_ASK_S)["results"]
    return tuple(results)


class Leftovers:
    """Joins vLLM's worker class."""

    def process(self) -> dict[str, int]:
        """Its id."""
        return {"pid": os.getpid()}

    def leftovers(self) -> dict[str, int]:
        """Counts by what is left."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # only a worker has vLLM

        worker = get_kv_transfer_group()._worker_hooks._worker
        return of_prefill(worker) if hasattr(worker, "layer_saved") else of_decode(worker)


def of_prefill(worker: Any) -> dict[str, int]:
    """Of a prefill rank: source blocks that vLLM must not free, pushes and writes of its lanes, staging memory."""
    lanes = worker._known_lanes()
    writes = [lane._out._writes for lane in lanes if lane._out._writes is not None]
    staging = worker._context.staging
    return {
        "requests whose blocks are held": len(worker._holds._holds) + len(worker._unread),
        "requests known": len(worker._sending),
        "pushes": sum(len(lane._book) for lane in lanes),
        "writes": sum(queue._num_writes_in_flight for queue in writes),
        "buffers in staging memory": 0 if staging is None or staging.is_idle else 1,
    }


def of_decode(receiver: Any) -> dict[str, int]:
    """Of a decode rank: reservations that wait, and what it remembers of them."""
    reception = receiver._reception
    return {
        "reservations": reception.num_waiting,
        "requests known": len(reception._by_request) + len(receiver._expected_at),
        "prefill ranks that wait for a reservation": sum(map(len, reception._parked.values())),
        "contents to compare": len(receiver._sums._wanted),
        "results not told": len(receiver._results) + len(receiver._losses),
    }
