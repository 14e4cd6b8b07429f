"""Requests with LoRA adapters and pushed KV, from their reservation to their end: the scheduler half of decode.

The workers hear of each once: when its first step comes, which they judge (``worker/first_steps.py``), or when none
follows.

    expect --> begin --------------> finish
        \\       \\--without KV: left
         \\--finish: left
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.failures import TransferFailure, log_failure
from pdcluster_connector.steps import Expect, FirstStep
from pdcluster_protocol.ids import RequestId, TransferId
from pdcluster_protocol.params import Reservation

_PREEMPTED: Final = (
    "the first step has read other files of the LoRA adapter than the KV was computed with, and vLLM preempted the "
    "request before it heard of it: its answer may be of both"
)


@dataclass(slots=True)
class _WithAdapter:
    transfer_id: TransferId
    block: int | None
    """The block of the push by which vLLM is told that the request must not run; None: it cannot be told."""
    begun_at: int | None = None
    """The number of its first step."""


class FirstSteps:
    """Of one decode engine. Scheduler thread only."""

    def __init__(self, group: KvGroup, num_stages: int = 1, *, can_fail_running: bool) -> None:
        """``group``: the first one. ``num_stages``: as in ``EngineFacts``, as ``can_fail_running`` is."""
        self._group = group
        self._max_under_way = num_stages + 1
        """The most steps that vLLM has begun and not ended (0.32 ``config/vllm.py``, ``max_concurrent_batches``)."""
        self._can_fail_running = can_fail_running
        self._requests: dict[RequestId, _WithAdapter] = {}
        self._step = 0
        """The number of the coming step."""
        self._begun: list[FirstStep] = []
        self._left: list[RequestId] = []

    def expect(self, request_id: RequestId, expect: Expect, reservation: Reservation) -> None:
        """A request with an adapter waits for its push."""
        block = _block_to_name(self._group, expect, reservation) if self._can_fail_running else None
        self._requests[request_id] = _WithAdapter(reservation.transfer_id, block)

    def begin(self, request_id: RequestId, *, has_kv: bool) -> None:
        """The coming step computes the request, and the step before it did not. Without KV its whole prompt."""
        request = self._requests.get(request_id)
        if request is None or request.begun_at is not None:
            return
        request.begun_at = self._step
        if has_kv:
            self._begun.append(FirstStep(request_id, request.transfer_id, request.block))
        else:
            self._left.append(request_id)

    def finish(self, request_id: RequestId) -> None:
        """vLLM has ended the request."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.begun_at is None:
            self._left.append(request_id)

    def take(self) -> tuple[tuple[FirstStep, ...], tuple[RequestId, ...]]:
        """The first steps and the left requests of which the workers hear with the coming step."""
        begun, left, self._begun, self._left = self._begun, self._left, [], []
        self._step += 1
        return tuple(begun), tuple(left)

    def blocks_named(self, blocks: Collection[int]) -> None:
        """The workers have named ``blocks`` to vLLM, which has ended all requests that it found by them.

        One whose first step has just ended and that is not ended goes on: vLLM has preempted it meanwhile, and finds no
        block of it. Later its blocks may be another request's.
        """
        oldest = self._step - self._max_under_way
        for request_id, request in self._requests.items():
            if request.begun_at is not None and request.begun_at >= oldest and request.block in blocks:
                request.block = None
                log_failure(TransferFailure.ADAPTER_MIXED, request_id, request.transfer_id, reason=_PREEMPTED)


def _block_to_name(group: KvGroup, expect: Expect, reservation: Reservation) -> int | None:
    """The first block of ``group`` that the push fills: vLLM then takes all that follow out of its prefix cache. With a
    window the last one, since vLLM takes others back. None: the push fills none."""
    if not expect.spans[0]:
        return None
    token = expect.spans[0][-1][1] - 1 if group.is_windowed else expect.spans[0][0][0]
    return reservation.remote_block_ids[0][token // group.block_tokens]
