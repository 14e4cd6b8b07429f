"""Messages between one prefill rank and one decode rank, beside the KV bytes.

    prefill                                   decode
      Hello ------------------------------------>      once per connection: who am I, what is my KV
      <------------------------ Welcome / Refusal      where your bytes go, or why not
      Open ------------------------------------->      may I write for (transfer, attempt)?
      <---------------------------- Grant / Denial     yes / no and why
      ...                                              KV bytes travel by the transport
      Done / Failed ---------------------------->      last byte acknowledged / I have given up
      <----------------------------------- Revoke      stop writing
      Fenced ----------------------------------->      I write no more for (transfer, attempt)

A frame is one version byte and one msgpack map with a ``type`` tag. Unknown types, unknown fields
and frames over ``MAX_FRAME_BYTES`` are refused.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import Attempt, BootId, EngineId, TransferId

SIDE_CHANNEL_VERSION: Final = 1
MAX_FRAME_BYTES: Final = 4 << 20
"""A Welcome names each region of each layer: about 100 bytes a region, so this holds 40,000 of them."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class RegionLayout(msgspec.Struct, frozen=True, array_like=True):
    """One layer's KV in one rank's memory: block ``b`` starts at ``base + b * block_bytes``."""

    layer_name: str
    group: int
    """Index of the KV cache group whose block table addresses this region."""
    base: int
    num_blocks: int
    block_bytes: int


class Hello(_Message, frozen=True, tag="hello"):
    """A prefill rank introduces itself. First frame of a connection."""

    engine_id: EngineId
    boot_id: BootId
    tp_rank: int
    tp_size: int
    fingerprint: KvFingerprint


class Welcome(_Message, frozen=True, tag="welcome"):
    """The decode rank's memory, and the transport session that reaches it."""

    engine_id: EngineId
    boot_id: BootId
    tp_rank: int
    tp_size: int
    session: str
    regions: tuple[RegionLayout, ...]


class Refusal(_Message, frozen=True, tag="refusal"):
    """No push is possible between these two engines. Final for this connection."""

    reason: str


class Open(_Message, frozen=True, tag="open"):
    """May this prefill rank write for this attempt? ``deadline_ms`` is the request's remaining time."""

    transfer_id: TransferId
    attempt: Attempt
    decode_boot_id: BootId
    deadline_ms: int


class Grant(_Message, frozen=True, tag="grant"):
    """Yes: until done, failed or revoked."""

    transfer_id: TransferId
    attempt: Attempt


class Denial(_Message, frozen=True, tag="denial"):
    """No, and why. The attempt has failed for this rank."""

    transfer_id: TransferId
    attempt: Attempt
    reason: str


class Done(_Message, frozen=True, tag="done"):
    """All that this rank had to write is acknowledged by the transport: ``num_bytes`` in ``num_layers`` layers."""

    transfer_id: TransferId
    attempt: Attempt
    num_bytes: int
    num_layers: int


class Failed(_Message, frozen=True, tag="failed"):
    """This rank has given up. ``is_fenced``: it surely writes no more; otherwise a write may still land."""

    transfer_id: TransferId
    attempt: Attempt
    reason: str
    is_fenced: bool


class Revoke(_Message, frozen=True, tag="revoke"):
    """Stop writing for this attempt and answer ``Fenced``."""

    transfer_id: TransferId
    attempt: Attempt


class Fenced(_Message, frozen=True, tag="fenced"):
    """This rank writes no more for this attempt, ever."""

    transfer_id: TransferId
    attempt: Attempt


ToDecode = Hello | Open | Done | Failed | Fenced
ToPrefill = Welcome | Refusal | Grant | Denial | Revoke

_M = TypeVar("_M")

_VERSION_BYTE: Final = bytes([SIDE_CHANNEL_VERSION])
_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_DECODE: Final[msgspec.msgpack.Decoder[ToDecode]] = msgspec.msgpack.Decoder(ToDecode)
_TO_PREFILL: Final[msgspec.msgpack.Decoder[ToPrefill]] = msgspec.msgpack.Decoder(ToPrefill)


def encode_frame(message: ToDecode | ToPrefill) -> bytes:
    """One frame, ready to send."""
    return _VERSION_BYTE + _ENCODER.encode(message)


def parse_to_decode(frame: bytes) -> ToDecode:
    """A frame that a prefill rank sent.

    Raises:
        ProtocolError: Another version, too large, or not such a message.
    """
    return _parse(frame, _TO_DECODE)


def parse_to_prefill(frame: bytes) -> ToPrefill:
    """A frame that a decode rank sent.

    Raises:
        ProtocolError: Another version, too large, or not such a message.
    """
    return _parse(frame, _TO_PREFILL)


def _parse(frame: bytes, decoder: msgspec.msgpack.Decoder[_M]) -> _M:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"side-channel frame has {len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
    if frame[:1] != _VERSION_BYTE:
        theirs = frame[0] if frame else None
        raise ProtocolError(
            f"side-channel peer speaks version {theirs}, ours is {SIDE_CHANNEL_VERSION}: "
            "run the same pdcluster on both engines"
        )
    try:
        return decoder.decode(memoryview(frame)[1:])
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ProtocolError(f"side-channel frame is not a known message: {error}") from error
