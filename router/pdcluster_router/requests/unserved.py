"""Rows for ``pdcluster why`` of requests that no engine got: refused as they came, turned away, or still in the queue.

``record.py`` has the rows of the requests that engines got.
"""

from __future__ import annotations

from msgspec.structs import replace

from pdcluster_router.core.apis.openai_errors import BUG, ApiError
from pdcluster_router.core.apis.trace_context import trace_id_in
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.services import Services
from pdcluster_router.telemetry.failures import FailureKind
from pdcluster_router.telemetry.kept import KeptRow, reason_of
from pdcluster_router.telemetry.metrics import Outcome


def keep_refused(services: Services, cycle: HotCycle, error: ApiError) -> None:
    """Keeps a request that was refused before it was parsed, or that a bug of ours has ended. ``error``: its answer.

    It gets no span: a client without a key could fill a collector with such requests.
    """
    if not services.kept.is_on or cycle.teller is not None:
        return  # The queue or the exchange keeps it.
    now = services.now()
    services.kept.keep(
        KeptRow(
            request_id=cycle.request_id.decode("ascii"),
            trace_id=trace_id_in(cycle.head.headers, cycle.head.fields),
            client=cycle.client,
            client_address=cycle.client_address,
            path=cycle.path,
            ended_at_unix_s=services.unix_now(),
            read_s=(cycle.whole_at or now) - cycle.begun_at if cycle.begun_at else None,
            turn_s=now - cycle.whole_at if cycle.whole_at else None,
            status=error.status,
            outcome="" if error.code == BUG.code else Outcome.REJECTED.value,
            error=error.code,
        )
    )


def keep_limited(services: Services, request: ClientRequest, error: ApiError) -> None:
    """Keeps a request that was refused because its key is over a limit. ``error``: its answer."""
    if services.kept.is_on or request.trace is not None:
        end = {"ended_at_unix_s": services.unix_now(), "outcome": Outcome.LIMITED.value}
        _keep(services, request, replace(facts_of(request), status=error.status, error=error.code, **end))


def keep_turned_away(
    services: Services,
    request: ClientRequest,
    kind: FailureKind,
    outcome: Outcome,
    reason: str,
    error: ApiError | None,
) -> None:
    """Keeps a request that the queue has refused. ``error``: None if it was withdrawn or its client has left."""
    waited_s = services.now() - request.received_at
    row = replace(
        facts_of(request, waited_s),
        ended_at_unix_s=services.unix_now(),
        status=error.status if error is not None else None,
        error=error.code if error is not None else "",
        outcome=outcome.value,
        moments=(waited_s, kind.value, "", 0, reason_of(reason)),
    )
    _keep(services, request, row)


def _keep(services: Services, request: ClientRequest, row: KeptRow) -> None:
    services.kept.keep(row)
    if request.trace is not None:
        services.tell_spans(request.trace, row, request.received_at)


def waiting(services: Services, request: ClientRequest) -> KeptRow:
    """The row of a request that is in the queue now."""
    return facts_of(request, services.now() - request.received_at)


def facts_of(request: ClientRequest, waited_s: float = 0.0) -> KeptRow:
    """The row of a request that has only waited so far."""
    return KeptRow(
        request_id=request.request_id,
        trace_id=request.trace_id,
        client=request.client,
        client_address=request.client_address,
        model_text=request.body.model_text,
        path=request.path,
        is_stream=request.body.is_stream,
        read_s=request.read_s,
        turn_s=request.turn_s,
        queue_s=waited_s,
        total_s=waited_s,
        ahead=request.turns_ahead,
    )
