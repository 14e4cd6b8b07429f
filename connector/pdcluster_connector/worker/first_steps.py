"""The first step of each request with a LoRA adapter and pushed KV, on a decode rank: which files did vLLM read for it?

vLLM reads the files of an evicted adapter in the step that needs it, and those of one that was loaded again in any
step. So the receiver's last look, when all KV has come, is not the last word. The forward thread compares once more
when the step has run. If the files were others, vLLM is told of one block of the request, fails the request and drops
the token of the step.

    wait ends --receipt--> held --first step, the same content--> forgotten
                             \\---first step, another content----> its block is named to vLLM
                              \\--left: no first step follows-----> forgotten
"""

from __future__ import annotations

from typing import Final

from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.failures import TransferFailure, log_failure
from pdcluster_connector.steps import DecodeStep, FirstStep
from pdcluster_connector.worker.held_news import RequestAdapter
from pdcluster_protocol.ids import RequestId

_CHANGED: Final = (
    "its first step has read LoRA adapter {!r} again, with other files than its KV was computed with: the client may "
    "ask again"
)
_MIXED: Final = (
    "the first step has read LoRA adapter {!r} again, with other files than the KV was computed with. vLLM cannot end "
    "a request that runs with kv_load_failure_policy recompute or with several KV groups, so the answer is of both"
)


class FirstStepJudge:
    """Of one decode rank. Forward thread only; waits for nothing."""

    def __init__(self, adapters: AdapterLoads | None) -> None:
        """``adapters``: those of the rank; None: its engine has none."""
        self._adapters = adapters
        self._held: dict[RequestId, RequestAdapter | None] = {}
        """Requests with an adapter whose wait has ended; None: without KV."""
        self._left: set[RequestId] = set()
        """Requests with an adapter that were left before their wait ended."""
        self._begun: tuple[FirstStep, ...] = ()

    def begin_step(self, step: DecodeStep) -> None:
        """The step runs now. Steps name each request with an adapter once: in its first step, or when none follows."""
        self._begun += step.first_steps
        for request_id in step.left:
            if request_id in self._held:
                del self._held[request_id]
            else:
                self._left.add(request_id)

    def ended(self, request_id: RequestId, adapter: RequestAdapter | None, *, is_received: bool) -> None:
        """The request's wait has ended, with its KV if ``is_received``. ``adapter``: None: it has none."""
        if adapter is None:
            return
        if request_id in self._left:
            self._left.remove(request_id)
        else:
            self._held[request_id] = adapter if is_received else None

    def take_foreign_blocks(self) -> set[int]:
        """A block of each request whose first step has just run with other files than its KV was computed with."""
        begun, self._begun = self._begun, ()
        return {block for first in begun if (block := self._foreign_block(first)) is not None}

    def _foreign_block(self, first: FirstStep) -> int | None:
        adapter = self._held.pop(first.request_id, None)
        if adapter is None or self._is_unchanged(adapter):
            return None
        kind, reason = TransferFailure.ADAPTER_CHANGED, _CHANGED
        if first.block is None:
            kind, reason = TransferFailure.ADAPTER_MIXED, _MIXED
        log_failure(kind, first.request_id, first.transfer_id, reason=reason.format(adapter.asked.name))
        return first.block

    def _is_unchanged(self, adapter: RequestAdapter) -> bool:
        """Files that were never read before count as others, though their content may be the same."""
        assert self._adapters is not None, "a request with an adapter on an engine without"
        load = self._adapters.in_step(adapter.asked)
        return load == adapter.load or self._adapters.content(load) == adapter.found
