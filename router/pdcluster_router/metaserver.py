"""Where decode engines bring their reservations. The reply is the outcome of the prefill.

200 carries an outcome. All else carries a failed one: 400 what is no reservation, 403 a call that no holder of the
cluster's secret has sealed, or a token that is not of this cluster or not for this attempt, 404 an unknown or ended
transfer: the live table is what ends a token's life, so a replayed one is of no use.

The token is for a transfer and an attempt and says nothing of where the KV goes; the seal is for every byte of the
body. Whether the decode engine that sealed it is the one that this transfer was sent to is not asked: its calls may
come from another address than it is reached at (a Service, another node of the engine), and holders of the secret
trust each other.
"""

from __future__ import annotations

from typing import Final

import orjson

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.metaserver import SEAL_HEADER, encode_outcome, failed
from pdcluster_protocol.params import Reservation, parse_reservation
from pdcluster_router.cycle import HotCycle
from pdcluster_router.failures import Failure, Kind
from pdcluster_router.services import Services

_SEAL: Final = SEAL_HEADER.encode()


def take_reservation(services: Services, cycle: HotCycle) -> None:
    """The reservation is with its transfer; the call is answered, or waits there for the outcome."""
    seal, body = cycle.head.fields.get(_SEAL, b""), cycle.take_body()
    try:
        # Before anything is parsed: 8 MiB of numbers take half a second and 150 MB, their seal 10 ms and nothing.
        services.secret.check_call(seal, body)
    except ProtocolError as error:
        _refuse(services, cycle, 403, Failure(Kind.BAD_TOKEN, reason=str(error)))
        return
    try:
        reservation = parse_reservation(orjson.loads(body))
    except (orjson.JSONDecodeError, ProtocolError) as error:
        _refuse(services, cycle, 400, Failure(Kind.RESERVATION_REFUSED, reason=str(error)))
        return
    try:
        services.secret.check(reservation.token, reservation.transfer_id, reservation.attempt, reservation.deadline_ms)
    except ProtocolError as error:
        _refuse(services, cycle, 403, _failure(Kind.BAD_TOKEN, reservation, str(error)))
        return
    transfer = services.transfers.get(reservation.transfer_id)
    if transfer is None:
        reason = f"transfer {reservation.transfer_id} is not known here, or has ended"
        _refuse(services, cycle, 404, _failure(Kind.RESERVATION_REFUSED, reservation, reason))
        return
    outcome = transfer.reserve(reservation, cycle)
    if outcome is not None:
        cycle.answer(200, encode_outcome(outcome))


def _failure(kind: Kind, reservation: Reservation, reason: str) -> Failure:
    return Failure(kind, transfer_id=reservation.transfer_id, attempt=reservation.attempt, reason=reason)


def _refuse(services: Services, cycle: HotCycle, status: int, failure: Failure) -> None:
    services.failures.tell(failure)
    cycle.answer(status, encode_outcome(failed(failure.reason)))
