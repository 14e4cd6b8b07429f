"""What is written down about one request: its trace line, its spans, its outcome, and each failure on the way.

Filled in by its exchange; decides nothing.
"""

from __future__ import annotations

from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.core.dialect import Posted
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.services import Services
from pdcluster_router.telemetry.failures import Failure, FailureKind
from pdcluster_router.telemetry.metrics import Outcome, Span


class Record:
    """One request's record. ``write`` ends it."""

    __slots__ = ("_attempt", "_line", "_request_id", "_services")

    def __init__(self, services: Services, request: ClientRequest, transfer_id: TransferId) -> None:
        self._services = services
        self._request_id = request.request_id
        self._attempt = 0
        self._line = RequestTrace(
            transfer_id=transfer_id,
            request_id=request.request_id,
            received_at=request.received_at,
            client=request.client,
        )

    def renewed(self, transfer_id: TransferId) -> None:
        """The request has a new transfer id."""
        self._line.transfer_id = transfer_id
        self._attempt = 0
        self._services.metrics.decode_resent.inc()

    def reserved(self, reservation: Posted) -> None:
        self._line.reserved_at = now = self._services.now()
        self._line.prompt_tokens = reservation.num_prompt_tokens
        self._line.cached_tokens = reservation.remote_cached_tokens
        self._services.metrics.took(Span.RESERVATION, now - self._line.received_at)

    def prefill_sent(self, attempt: int) -> None:
        self._attempt = attempt
        self._line.prefill_sent_at = self._services.now()

    def prefill_replied(self) -> None:
        self._line.prefill_replied_at = now = self._services.now()
        self._services.metrics.took(Span.PREFILL, now - (self._line.prefill_sent_at or now))

    def first_byte(self) -> None:
        self._line.first_byte_at = now = self._services.now()
        self._services.metrics.took(Span.FIRST_BYTE, now - self._line.received_at)

    def answered(self, status: int | None, outcome: Outcome) -> None:
        """The client has its answer, or has left. ``status``: what it got, None for no (whole) answer."""
        self._line.ended_at = now = self._services.now()
        self._line.status = status
        self._services.metrics.took(Span.TOTAL, now - self._line.received_at)
        self._services.metrics.ended(outcome)

    def failed(self, kind: FailureKind, reason: str, engine: str = "") -> None:
        transfer_id = self._line.transfer_id
        self._services.failures.tell(Failure(kind, self._request_id, transfer_id, self._attempt, engine, reason))

    def write(self) -> None:
        self._services.trace.write(self._line)
