"""The pushes of one lane: their state, and how their commands are carried out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from pdcluster_connector.core.adapters import AdapterLoad
from pdcluster_connector.core.sending import (
    CutLane,
    Push,
    PushKey,
    PushPhase,
    Release,
    Send,
    SendingCommands,
    SumUpPush,
)
from pdcluster_connector.failures import PUSHED_BYTES, PUSHES_DONE, TransferFailure, count, log_failure
from pdcluster_connector.steps import ContentOrder
from pdcluster_connector.trace import Trace
from pdcluster_connector.worker.batches import LayerRecord
from pdcluster_protocol.ids import RequestId
from pdcluster_protocol.side_channel import ToDecode
from pdcluster_protocol.trace import PushTrace

_LOG: Final = logging.getLogger("vllm.pdcluster.push")


@dataclass(slots=True, eq=False)
class LivePush:
    """A push, and the facts for its trace line. Times are monotonic seconds."""

    push: Push
    request_id: RequestId
    attempt_token: str
    num_prompt_tokens: int
    forward_begin: float
    adapter: AdapterLoad | None = None
    """The load of the LoRA adapter with which the prompt is computed; None: the request has no adapter."""
    forward_end: float = 0.0
    last_step: int | None = None
    num_pieces: int = 0
    num_writes: int = 0
    content: ContentOrder | None = None
    """Set if the push's content is compared."""
    decode_rank: int = 0
    is_forgotten: bool = False
    """vLLM has freed the request: no order will name it again."""
    layers: list[LayerRecord] = field(default_factory=list)

    @property
    def is_reportable(self) -> bool:
        """Whether the push has ended. A push that is done and was needed waits for the end of its last forward pass."""
        is_done = self.push.phase is PushPhase.DONE and not self.push.is_unneeded
        return self.push.is_ended and (not is_done or self.forward_end > 0)

    @property
    def _outcome(self) -> str:
        if self.push.is_unneeded:
            return "unneeded"
        return "done" if self.push.phase is PushPhase.DONE else "failed"

    def as_trace(self, now: float) -> PushTrace:
        """The line for the trace file, once the push is over."""
        return PushTrace(
            transfer_id=self.push.key.transfer_id,
            request_id=self.request_id,
            attempt=self.push.key.attempt,
            decode_rank=self.decode_rank,
            outcome=self._outcome,
            reason=self.push.reason,
            prompt_tokens=self.num_prompt_tokens,
            num_layers=len({record.layer for record in self.layers}),
            num_bytes=self.push.acked_bytes,
            is_content_compared=self.content is not None,
            ranges=self.num_pieces,
            writes=self.num_writes,
            forward_begin=self.forward_begin,
            forward_end=self.forward_end,
            ended_at=now,
            layers=tuple(record.as_trace() for record in self.layers),
        )


@dataclass(slots=True)
class PushBook:
    """Every push of one lane that has not ended, or whose trace line is still due. Lane thread only."""

    send: Callable[[ToDecode], None]
    on_release: Callable[[RequestId], None]
    on_cut: Callable[[str], None]
    """Called with the reason when a push needs the session closed. It must not wait, nor apply commands itself."""
    trace: Trace
    on_sum_up: Callable[[LivePush], None]
    """Called when a push is to be summed up. It must not wait, nor apply commands itself."""
    _live: dict[PushKey, LivePush] = field(default_factory=dict)
    _ended: set[PushKey] = field(default_factory=set)
    """Pushes that have ended while vLLM still computes their prompt: they must not begin again."""

    def __iter__(self) -> Iterator[LivePush]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def get(self, key: PushKey) -> LivePush | None:
        """The push of ``key``; None: there is none, or it has ended and was reported."""
        return self._live.get(key)

    def has_ended(self, key: PushKey) -> bool:
        """Whether the push of ``key`` is over, though orders that name it may still come."""
        return key in self._ended

    def forget(self, key: PushKey) -> None:
        """No order will name ``key`` again."""
        self._ended.discard(key)
        if live := self._live.get(key):
            live.is_forgotten = True

    def add(self, live: LivePush) -> None:
        """Takes a new push in."""
        self._live[live.push.key] = live

    def give_up(self, key: PushKey, reason: str, now: float) -> None:
        """The push of ``key``, if there is one, goes no further."""
        if live := self._live.get(key):
            self.apply(live, live.push.give_up(reason, now=now))

    def forgo_second_push(self, key: PushKey) -> None:
        """The source of ``key`` is about to be overwritten: it is not read for a second push."""
        if (live := self._live.get(key)) and live.push.may_push_again:
            self.apply(live, live.push.settled())

    def forward_ended(self, step: int, at: float) -> None:
        """The forward pass of ``step`` is over."""
        for live in self:
            if live.last_step == step:
                live.forward_end = at
                self.report_if_due(live)

    def apply(self, live: LivePush, commands: SendingCommands) -> None:
        """Carries out the push's ``commands``."""
        for command in commands:
            match command:
                case Send(message):
                    self.send(message)
                case Release():
                    self._release(live)
                case CutLane(reason):
                    self.on_cut(reason)
                case SumUpPush():
                    self.on_sum_up(live)
        self.report_if_due(live)

    def report_if_due(self, live: LivePush) -> None:
        """Writes the push's trace line and drops the push, once it is reportable."""
        if live.is_reportable and live.push.key in self._live:
            del self._live[live.push.key]
            if not live.is_forgotten:
                self._ended.add(live.push.key)
            self.trace.write(live.as_trace(time.monotonic()))

    def _release(self, live: LivePush) -> None:
        self.on_release(live.request_id)
        push = live.push
        if push.phase is PushPhase.DONE:
            count(PUSHES_DONE)
            count(PUSHED_BYTES, push.acked_bytes)
            _LOG.debug("push done transfer_id=%s bytes=%d", push.key.transfer_id, push.acked_bytes)
            return
        log_failure(TransferFailure.PUSH_FAILED, live.request_id, *push.key, push.reason)
