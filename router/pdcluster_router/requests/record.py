"""What is written down about one request: its trace line, its spans, its outcome, and each failure on the way.

Filled in by its exchange; decides nothing.
"""

from __future__ import annotations

from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import Reservation
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.services import Services
from pdcluster_router.telemetry.failures import Failure, Kind
from pdcluster_router.telemetry.metrics import Outcome, Span
from pdcluster_router.telemetry.trace import Times


class Record:
    """One request's record. ``write`` ends it."""

    __slots__ = ("_attempt", "_request_id", "_services", "_times")

    def __init__(self, services: Services, request: ClientRequest, transfer_id: TransferId) -> None:
        self._services = services
        self._request_id = request.request_id
        self._attempt = 0
        self._times = Times(transfer_id, request.request_id, received_at=request.received_at, client=request.client)

    def renewed(self, transfer_id: TransferId) -> None:
        """The request has a new transfer id."""
        self._times.transfer_id = transfer_id
        self._attempt = 0
        self._services.metrics.decode_resent.inc()

    def reserved(self, reservation: Reservation) -> None:
        self._times.reserved_at = now = self._services.now()
        self._times.prompt_tokens = reservation.num_prompt_tokens
        self._times.cached_tokens = reservation.remote_cached_tokens
        self._services.metrics.took(Span.RESERVATION, now - self._times.received_at)

    def prefill_sent(self, attempt: int) -> None:
        self._attempt = attempt
        self._times.prefill_sent_at = self._services.now()

    def prefill_replied(self) -> None:
        self._times.prefill_replied_at = now = self._services.now()
        self._services.metrics.took(Span.PREFILL, now - (self._times.prefill_sent_at or now))

    def first_byte(self) -> None:
        self._times.first_byte_at = now = self._services.now()
        self._services.metrics.took(Span.FIRST_BYTE, now - self._times.received_at)

    def answered(self, status: int | None, outcome: Outcome) -> None:
        """The client has its answer, or has left. ``status``: what it got, None for no (whole) answer."""
        self._times.ended_at = now = self._services.now()
        self._times.status = status
        self._services.metrics.took(Span.TOTAL, now - self._times.received_at)
        self._services.metrics.ended(outcome)

    def failed(self, kind: Kind, reason: str, engine: str = "") -> None:
        transfer_id = self._times.transfer_id
        self._services.failures.tell(Failure(kind, self._request_id, transfer_id, self._attempt, engine, reason))

    def write(self) -> None:
        self._services.trace.write(self._times)
