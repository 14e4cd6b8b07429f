"""Metaserver bodies and ``kv_transfer_params``: JSON that is none, is not ours, or claims what it must not."""

from __future__ import annotations

import json
import random
from typing import Final

import msgspec

from fuzz.mutations import spoil_bytes, spoil_fields
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import Attempt, BootId, EngineId, TransferId
from pdcluster_protocol.metaserver import decode_outcome
from pdcluster_protocol.params import (
    DecodeParams,
    Reservation,
    SideChannelAddress,
    parse_decode_params,
    parse_reservation,
    refusal_in,
    to_wire,
)
from pdcluster_protocol.secret import Secret, make_secret

OURS, THEIRS = make_secret("the secret of ours"), make_secret("the secret of theirs")
T: Final = TransferId("t")
RESERVATION: Final = Reservation(
    request_id="r", remote_block_ids=((1, 2),), remote_block_size=16, remote_engine_id=EngineId("d"),
    remote_host="127.0.0.1", remote_port=1, remote_tp_size=1, remote_cached_tokens=0, transfer_id=T, attempt=Attempt(1),
    deadline_ms=1000, remote_boot_id=BootId("b"),
    remote_side_channels=(SideChannelAddress("127.0.0.1", 1, BootId("b")),),
    num_prompt_tokens=32, prompt_digest="0" * 24,
)  # fmt: skip
PARAMS: Final = DecodeParams(metaserver="http://r/v1/metaserver", transfer_id=T, deadline_ms=1000)


def is_let_in(body: bytes, secret: Secret) -> bool:
    """Whether a metaserver with ``secret`` takes ``body`` as a reservation."""
    try:
        reservation = parse_reservation(json.loads(body))
        secret.check(reservation.token, reservation.transfer_id, reservation.attempt, reservation.deadline_ms)
    except (ProtocolError, ValueError):
        return False
    return True


def bodies(rng: random.Random) -> bytes:
    """One body; its token is never one that our router made for what the body says."""
    fields = to_wire(rng.choice((RESERVATION, PARAMS)))
    fields["token"] = rng.choice(("", "1.00", THEIRS.mint(T, Attempt(1), 1000), OURS.mint(T, Attempt(2), 1000)))
    if rng.random() < 0.7:
        fields = spoil_fields(rng, fields)
    body = msgspec.json.encode({k: v.decode("latin-1") if isinstance(v, bytes) else v for k, v in fields.items()})
    return spoil_bytes(rng, body) if rng.random() < 0.4 else body


def run(num_inputs: int, seed: int) -> str:
    """Feed ``num_inputs`` bodies to everything that parses one.

    Raises:
        AssertionError: One was let in. Any other exception is a crash.
    """
    rng = random.Random(seed)
    genuine = msgspec.structs.replace(RESERVATION, token=OURS.mint(T, Attempt(1), 1000))
    assert is_let_in(msgspec.json.encode(genuine), OURS)
    for _ in range(num_inputs):
        body = bodies(rng)
        assert not is_let_in(body, OURS) or _says_attempt_two(body), body
        _parse_otherwise(body)
    return f"{num_inputs} metaserver bodies: none was let in"


def _says_attempt_two(body: bytes) -> bool:
    """A spoiled attempt may happen to be the one that the token is for."""
    return bool(json.loads(body).get("attempt") == 2)


def _parse_otherwise(body: bytes) -> None:
    refusal_in(body)
    for parse in (decode_outcome, lambda raw: parse_decode_params(json.loads(raw))):
        try:
            parse(body)
        except (ProtocolError, ValueError):
            continue
