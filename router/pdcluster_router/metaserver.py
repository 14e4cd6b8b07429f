"""Where decode engines bring their reservations. The reply is the outcome of the prefill.

200 carries an outcome; 404 an unknown or ended transfer, 400 what is no reservation: both with a failed outcome too.
"""

from __future__ import annotations

import logging

import orjson

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.metaserver import encode_outcome, failed
from pdcluster_protocol.params import parse_reservation
from pdcluster_router.cycle import HotCycle
from pdcluster_router.services import Services

logger = logging.getLogger(__name__)


def take_reservation(services: Services, cycle: HotCycle) -> None:
    """The reservation is with its transfer; the call is answered, or waits there for the outcome."""
    try:
        reservation = parse_reservation(orjson.loads(cycle.take_body()))
    except (orjson.JSONDecodeError, ProtocolError) as error:
        _refuse(services, cycle, 400, str(error))
        return
    transfer = services.transfers.get(reservation.transfer_id)
    if transfer is None:
        _refuse(services, cycle, 404, f"transfer {reservation.transfer_id} is not known here, or has ended")
        return
    outcome = transfer.reserve(reservation, cycle)
    if outcome is not None:
        cycle.answer(200, encode_outcome(outcome))


def _refuse(services: Services, cycle: HotCycle, status: int, reason: str) -> None:
    logger.warning("reservation refused status=%d reason=%s", status, reason)
    services.metrics.reservation_refused.inc()
    cycle.answer(status, encode_outcome(failed(reason)))
