"""The block tables of a prefill engine's requests at each step, and the requests whose blocks vLLM has taken away.

Both are known in every supported version of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pdcluster_connector.scheduler.prefill import BlockTable
from pdcluster_protocol.ids import RequestId

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


def resolved(output: SchedulerOutput) -> Callable[[RequestId], BlockTable]:
    """The whole table of each request, as ``SchedulerOutput`` of vLLM 0.30 and newer gives it."""
    table_of: Callable[[RequestId], BlockTable] = output.kv_connector_block_state.resolve_block_ids
    return table_of


class BlockTables:
    """Follows the changes that the ``SchedulerOutput`` of older versions tells (vLLM 0.23 ``v1/core/sched/output.py``).

    Scheduler thread only. vLLM takes blocks before a sliding window back. A table here keeps these blocks, where newer
    versions show the null block. Decode has the same windows and wants none of these blocks.
    """

    def __init__(self) -> None:
        self._tables: dict[RequestId, tuple[list[int], ...]] = {}

    def follow(self, output: SchedulerOutput) -> Callable[[RequestId], BlockTable]:
        """The tables as of the step ``output``. The caller must pass every step, in order."""
        self._forget(output.finished_req_ids)
        self._forget(output.preempted_req_ids or ())
        for new in output.scheduled_new_reqs:
            self._begin(RequestId(new.req_id), new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is None:
                continue
            if request_id in cached.resumed_req_ids:
                self._begin(RequestId(request_id), blocks)
            else:
                for table, more in zip(self._tables[RequestId(request_id)], blocks, strict=True):
                    table.extend(more)
        return self._tables.__getitem__

    def _begin(self, request_id: RequestId, blocks: Iterable[Iterable[int]]) -> None:
        self._tables[request_id] = tuple(map(list, blocks))

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._tables.pop(RequestId(request_id), None)


class Preemptions:
    """Finds the requests that have lost all of their blocks. Scheduler thread only.

    vLLM counts the preemptions of each request, in every version, in the one function that takes the blocks.
    ``SchedulerOutput.preempted_req_ids`` names the requests too. But before vLLM 0.26 it lacks the running requests
    that ``reset_prefix_cache`` preempts (``v1/core/sched/scheduler.py``).
    """

    def __init__(self) -> None:
        self._counted: dict[RequestId, tuple[Request, int]] = {}

    def add(self, request: Request) -> None:
        self._counted[request.request_id] = request, request.num_preemptions

    def forget(self, request_id: RequestId) -> None:
        self._counted.pop(request_id, None)

    def take_new(self) -> set[RequestId]:
        """The requests that were preempted since the last call."""
        new = [request for request, count in self._counted.values() if request.num_preemptions != count]
        for request in new:
            self.add(request)
        return {request.request_id for request in new}
