"""How long a request waited in the queue of a prefill engine, and how long it was computed.

    add --queued--> first step --computed--> finish

Scheduler thread only. Pure: no I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.prefill_answer import PrefillAnswer


@dataclass(slots=True)
class _Times:
    """Monotonic seconds. ``began_at``: None: no step has computed it."""

    added_at: float
    began_at: float | None = None


class PrefillTimes:
    """Those of all requests of one prefill engine that are to be pushed."""

    def __init__(self) -> None:
        self._of: dict[RequestId, _Times] = {}

    def add(self, request_id: RequestId, *, now: float) -> None:
        """The request is in the queue."""
        self._of[request_id] = _Times(now)

    def begin(self, request_id: RequestId, *, now: float) -> None:
        """A step computes the request. Only the first one counts: a request that is preempted waits in its compute."""
        times = self._of.get(request_id)
        if times is not None and times.began_at is None:
            times.began_at = now

    def finish(self, request_id: RequestId, *, now: float) -> PrefillAnswer:
        """The times of the request, which ends; without times if it was not added, or no step has computed it."""
        times = self._of.pop(request_id, None)
        if times is None or times.began_at is None:
            return PrefillAnswer()
        return PrefillAnswer(
            pdcluster_queued_s=round(times.began_at - times.added_at, 6),
            pdcluster_computed_s=round(now - times.began_at, 6),
        )
