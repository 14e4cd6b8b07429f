"""The worker half of a decode engine: announces what is expected and reports what came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pdcluster_connector.core.reception import Lost
from pdcluster_connector.steps import DecodeStep
from pdcluster_connector.worker.receiver import Receiver
from pdcluster_protocol.ids import RequestId

_CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Receipts:
    """Requests whose wait ended, each named once; ``failed`` is part of ``ended``."""

    ended: set[RequestId] = field(default_factory=set)
    failed: set[RequestId] = field(default_factory=set)


class DecodeWorker:
    """One decode rank. Forward thread only; nothing waits."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def begin_step(self, step: DecodeStep) -> None:
        """The receiver knows the requests that were reserved or cancelled in this step."""
        if step.expects or step.ended or step.cancels:
            self._receiver.announce((*step.expects, *step.ended, *step.cancels))

    def receipts(self) -> Receipts:
        """What ended since the last call."""
        receipts = Receipts()
        for received in self._receiver.take_results():
            receipts.ended.add(received.request_id)
            if not received.report.is_received:
                receipts.failed.add(received.request_id)
        return receipts

    def losses(self) -> list[Lost]:
        """Attempts that this rank has given up since the last call."""
        return self._receiver.take_losses()

    def close(self) -> None:
        """End the receiver and cut every session. Waits up to 9 s."""
        self._receiver.close(_CLOSE_S)
