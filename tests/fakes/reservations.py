"""The reservations that fake decode engines post, and how they are sealed."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from fakes.http import request_bytes
from pdcluster_protocol.ids import BootId, EngineId, TransferId
from pdcluster_protocol.metaserver import METASERVER_PATH, SEAL_HEADER
from pdcluster_protocol.params import LocalPrefill, Reservation, SideChannelAddress, sealed, to_wire
from pdcluster_protocol.secret import Secret, make_secret
from pdcluster_router.core.requests.pairing import FIRST_ATTEMPT

SECRET = make_secret("the secret of the tests")
PROMPT_TOKENS = 42
CACHED_TOKENS = 16


def plain_reservation(transfer_id: TransferId, **changes: object) -> Reservation:
    """The first reservation for this transfer, without a token."""
    reservation = Reservation(
        request_id="cmpl-1",
        remote_block_ids=((3, 4, 5),),
        remote_block_size=16,
        remote_engine_id=EngineId("decode-0"),
        remote_host="127.0.0.1",
        remote_port=6000,
        remote_tp_size=1,
        remote_cached_tokens=CACHED_TOKENS,
        transfer_id=transfer_id,
        attempt=FIRST_ATTEMPT,
        deadline_ms=1,
        remote_boot_id=BootId("boot-1"),
        remote_side_channels=(SideChannelAddress("127.0.0.1", 6000, BootId("boot-1")),),
        num_prompt_tokens=PROMPT_TOKENS,
        prompt_digest="d",
    )
    return msgspec.structs.replace(reservation, **changes)


def reservation_of(params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What decode posts for these transfer parameters."""
    named = {name: params[name] for name in ("attempt", "deadline_ms", "token")}
    reservation = plain_reservation(params["transfer_id"], **named)
    return {**to_wire(sealed(reservation, SECRET)), **changes}


def local_prefill_of(params: dict[str, Any]) -> dict[str, Any]:
    """What decode posts for these transfer parameters when it computes what it lacks itself."""
    said = LocalPrefill(
        transfer_id=params["transfer_id"],
        attempt=params["attempt"],
        deadline_ms=params["deadline_ms"],
        token=params["token"],
        num_prompt_tokens=PROMPT_TOKENS,
        num_local_tokens=PROMPT_TOKENS - CACHED_TOKENS,
    )
    return to_wire(said)


def reservation_call(reservation: object, secret: Secret = SECRET, path: str = METASERVER_PATH) -> bytes:
    """The request by which decode posts this, sealed. ``reservation``: an object for JSON, or the very bytes."""
    body = reservation if isinstance(reservation, bytes) else json.dumps(reservation).encode()
    return request_bytes(path, body, {SEAL_HEADER: secret.seal_call(body)})
