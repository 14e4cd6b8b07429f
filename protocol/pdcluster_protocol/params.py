"""``kv_transfer_params`` on each leg of a request, with vLLM's ``remote_*`` names.

    router --DecodeParams--> decode --Reservation--> metaserver --Reservation--> prefill
                                  or --LocalPrefill--> metaserver, and no prefill

If vllm-ascend's layerwise connector (0.23, ``mooncake_layerwise_connector.py``) has a name for a thing, this module
uses that name. A message without our version is refused. ``vllm_ascend.py`` has the messages of vllm-ascend's own
engines.
"""

from __future__ import annotations

import hmac
from enum import Enum
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from pdcluster_protocol.bounds import (
    MAX_COUNT,
    AttemptNumber,
    Count,
    CountOrNone,
    Index,
    Milliseconds,
    Port,
    Side,
    odd_number,
)
from pdcluster_protocol.errors import NO_JSON, ProtocolError
from pdcluster_protocol.ids import NO_ATTEMPT, Attempt, BootId, EngineId, TransferId
from pdcluster_protocol.secret import SECRET_VARIABLE, Secret

PARAMS_VERSION: Final = 1


class ContentCheck(Enum):
    """How much of the pushed KV decode compares with what prefill has, before the first token."""

    OFF = "off"
    SAMPLED = "sampled"
    """A few tokens of a few layers, other ones for each transfer."""
    FULL = "full"


class DecodeParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Router to decode engine: reserve blocks, tell them to ``metaserver``, wait for the push."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    metaserver: str
    """URL of the metaserver in the very router process that owns the request."""
    transfer_id: TransferId
    attempt: AttemptNumber = Attempt(1)
    deadline_ms: Milliseconds
    """Milliseconds from the sending of this message until decode must have the KV, in [1, ``MAX_MS``]."""
    token: str = ""
    """``Secret.mint`` of transfer id, attempt and ``deadline_ms``. Copied into the reservation as it is."""
    wants_receipt: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether the content of this transfer shall be compared, and decode's answer shall carry a ``Receipt``. Unset is
    no, and is left out on the wire: an engine of an older release refuses unknown fields, so it refuses only requests
    for proof."""
    wants_whole: bool | msgspec.UnsetType = msgspec.UNSET
    """As of ``whole.py``. Unset is no."""
    version: int = PARAMS_VERSION


class SideChannelAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where one decode rank listens for prefill ranks, in the life that ``boot_id`` names."""

    host: str
    port: Port
    boot_id: BootId


class Reservation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The blocks to fill and where they are: decode to metaserver, and on to prefill.

    On the way the router sets ``attempt``, ``token`` and ``deadline_ms`` (``for_attempt``).
    """

    do_remote_prefill: bool = False
    do_remote_decode: bool = True
    request_id: str
    """Decode's own id of the request, for its logs only; ``transfer_id`` pairs the engines."""
    token_ids: tuple[Index, ...] = ()
    remote_block_ids: tuple[tuple[Index, ...], ...]
    """Per KV cache group, by position from the prompt's start; 0 is vLLM's null block: not to be filled."""
    remote_block_size: Count
    remote_engine_id: EngineId
    remote_host: str
    remote_port: Port
    """Side channel of decode's rank 0. ``remote_side_channels`` has that of every rank."""
    remote_block_sizes: tuple[CountOrNone, ...] = ()
    """Tokens in a block of each KV group; 0: the group holds recurrent state, one block for the request.
    Default: ``remote_block_size`` in all."""
    remote_page_sizes: tuple[CountOrNone, ...] = ()
    """Tokens in a page (vLLM's kernel block) of each KV group; a block is one page or several. Default: block sizes."""
    remote_tp_size: Side
    remote_pp_size: Side = 1
    remote_dp_rank: Index = 0
    """The data-parallel engine of decode that reserved; its side channels are named below."""
    remote_pcp_size: Side = 1
    remote_dcp_size: Side = 1
    remote_cached_tokens: CountOrNone
    """Leading prompt tokens that decode already has; a multiple of every group's block size."""
    transfer_id: TransferId
    attempt: AttemptNumber
    deadline_ms: Milliseconds
    token: str = ""
    remote_boot_id: BootId
    """Boot id of decode's rank 0."""
    remote_side_channels: tuple[SideChannelAddress, ...]
    """One address per decode rank: the TP ranks of each pipeline stage, stage by stage."""
    num_prompt_tokens: Count
    prompt_digest: str
    """``digest_prompt`` of the prompt as decode tokenized it. Prefill refuses to push another prompt's KV."""
    lost_attempt: Annotated[Attempt, Meta(ge=0, le=MAX_COUNT)] = NO_ATTEMPT
    """Decode to metaserver: the newest attempt that decode has given up, to ask for the next one; 0: none."""
    lost_reason: str = ""
    content_check: ContentCheck = ContentCheck.OFF
    """How much of the content that it pushes prefill shall sum up."""
    seal: str | msgspec.UnsetType = msgspec.UNSET
    """Decode's seal over all fields that stay the same on the way to prefill: ``sealed``. Unset: decode is of an older
    release and made none. It is then left out on the wire: a prefill engine of that release refuses an unknown field.
    """
    wants_whole: bool | msgspec.UnsetType = msgspec.UNSET
    """As of ``whole.py``. The router sets it."""
    version: int = PARAMS_VERSION

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens in a block of each KV group; 0: recurrent state."""
        return self.remote_block_sizes or (self.remote_block_size,) * len(self.remote_block_ids)

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Tokens in a page of each KV group; 0: recurrent state."""
        return self.remote_page_sizes or self.block_sizes


class LocalPrefill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decode to metaserver, in place of a reservation: decode itself computes the missing tokens of this prompt."""

    transfer_id: TransferId
    attempt: AttemptNumber
    deadline_ms: Milliseconds
    token: str = ""
    num_prompt_tokens: Count
    num_local_tokens: Count
    """The missing tokens. ``parse_call`` knows a ``LocalPrefill`` by this field, which no reservation has."""
    version: int = PARAMS_VERSION


DecodeCall: TypeAlias = Reservation | LocalPrefill
"""A call of decode to the metaserver."""


class Receipt(msgspec.Struct, frozen=True):
    """Decode to router, in its answer's ``kv_transfer_params``, if the router wants it: how much KV was pushed."""

    pdcluster_received_tokens: int
    """Prompt tokens whose KV every rank has received whole; 0: decode computed all of them or had them."""
    pdcluster_is_content_compared: bool = False
    """Whether each rank has found the content sums of what it received equal to those of what was pushed."""
    pdcluster_transfer_protocol: str = ""
    """The protocol by which the bytes came."""


class _DecodeReply(msgspec.Struct, frozen=True):
    kv_transfer_params: Receipt | None = None


def for_attempt(reservation: Reservation, attempt: Attempt, token: str, deadline_ms: int) -> Reservation:
    """Prefill's order for ``attempt``: the same blocks, the router's token for it, and the time that is left."""
    return msgspec.structs.replace(
        reservation,
        attempt=attempt,
        token=token,
        deadline_ms=deadline_ms,
        lost_attempt=NO_ATTEMPT,
        lost_reason="",
    )


def sealed(reservation: Reservation, secret: Secret) -> Reservation:
    """The reservation with decode's seal. Prefill checks it, so a thief of a token cannot have other blocks filled.

    Costs 3 us for 8 blocks and 35 us for 2,000. The seal does not cover the fields that the router changes on the way
    (``_NOT_SEALED``); the token covers attempt and deadline.
    """
    return msgspec.structs.replace(reservation, seal=secret.seal_order(_said_by_decode(reservation)))


def check_seal(reservation: Reservation, secret: Secret) -> None:
    """A holder of the secret has made this parsed reservation, for any attempt. Costs what ``sealed`` does.

    Raises:
        ProtocolError: The reservation has no seal, or the seal of another reservation or cluster.
    """
    seal = "" if isinstance(reservation.seal, msgspec.UnsetType) else reservation.seal
    if not seal:
        raise ProtocolError(
            f"the reservation of decode engine {reservation.remote_engine_id} has no seal: run the same pdcluster on "
            "prefill and decode, and ask through the router"
        )
    expected = secret.seal_order(_said_by_decode(reservation))
    if not seal.isascii() or not hmac.compare_digest(seal, expected):
        raise ProtocolError(
            f"the reservation of decode engine {reservation.remote_engine_id} is not what was sealed: give all engines "
            f"of one cluster the same {SECRET_VARIABLE}, and let nothing between them change an order"
        )


_NOT_SEALED: Final[dict[str, object]] = {
    "attempt": NO_ATTEMPT,
    "token": "",
    "deadline_ms": 0,
    "lost_attempt": NO_ATTEMPT,
    "lost_reason": "",
    "seal": msgspec.UNSET,
    "wants_whole": msgspec.UNSET,
}


def _said_by_decode(reservation: Reservation) -> bytes:
    """The bytes under the seal, equal at both ends: all fields in order, without the values that change on the way."""
    return msgspec.json.encode(msgspec.structs.replace(reservation, **_NOT_SEALED))


_HALF_A_NAME: Final = "a name, or what is no text, has half a character: send whole text"
_ENCODER: Final = msgspec.msgpack.Encoder()
_VERSION_KEY: Final = b'"version":'
"""Behind a reservation's last array these bytes can only be its key: in a text, their quotes would be escaped."""
_RESERVATION: Final = msgspec.json.Decoder(Reservation)
_Params = TypeVar("_Params", DecodeParams, Reservation, LocalPrefill)


def parse_decode_params(params: object) -> DecodeParams:
    """The router's instructions to decode.

    Raises:
        ProtocolError: A field is missing, unknown or of the wrong type, or the version is not ours.
    """
    return _parse(params, DecodeParams)


def parse_reservation(params: object) -> Reservation:
    """Decode's reservation, from a decoded JSON object.

    Raises:
        ProtocolError: A field is missing, unknown or of the wrong type, fields do not fit together, or the version is
            not ours.
    """
    return _checked(_parse(params, Reservation))


def _checked(reservation: Reservation) -> Reservation:
    """``reservation``, whose fields fit together. Raises: ProtocolError: They do not."""
    num_ranks = reservation.remote_tp_size * reservation.remote_pp_size
    if len(reservation.remote_side_channels) != num_ranks:
        raise ProtocolError(
            f"decode engine {reservation.remote_engine_id} has TP {reservation.remote_tp_size} in "
            f"{reservation.remote_pp_size} stages but named {len(reservation.remote_side_channels)} side channels: "
            "it must name one for each rank"
        )
    if num_ranks > 1 and len({(one.host, one.port) for one in reservation.remote_side_channels}) != num_ranks:
        raise ProtocolError(
            f"decode engine {reservation.remote_engine_id} named one side channel for several of its {num_ranks} "
            "ranks: each must have its own"
        )
    if len(reservation.remote_block_ids) != len(reservation.block_sizes):
        raise ProtocolError(
            f"decode engine {reservation.remote_engine_id} has {len(reservation.remote_block_ids)} block tables for "
            f"{len(reservation.block_sizes)} KV groups: it must name one for each"
        )
    if reservation.remote_page_sizes:
        _require_pages(reservation)
    return reservation


def parse_call(params: object) -> DecodeCall:
    """Decode's call to the metaserver, from a decoded JSON object.

    Raises:
        ProtocolError: As ``parse_reservation``.
    """
    if isinstance(params, dict) and "num_local_tokens" in params:
        return _parse_local(params)
    return parse_reservation(params)


def reservation_in(call: bytes | bytearray) -> Reservation | None:
    """The reservation in the JSON of ``call``, as ``parse_call`` reads it, at half the cost. None: ``parse_call`` must
    read ``call``, which is a ``LocalPrefill`` or has a fault. Values that are dropped (all but the last of a repeated
    key, all behind the third of an address) may have broken numbers and text.

    Raises:
        ProtocolError: The reservation's fields do not fit together.
    """
    # Decode writes the version last. The unread rest of a side channel's address may hold such a key too.
    if call.find(_VERSION_KEY, call.rfind(b"]")) < 0:
        return None
    try:
        reservation = _RESERVATION.decode(call)
    except NO_JSON:
        return None
    return _checked(reservation) if reservation.version == PARAMS_VERSION else None


def receipt_in(reply: bytes) -> Receipt | None:
    """Decode's receipt, from the JSON body of its answer; None: the answer has none."""
    try:
        return msgspec.json.decode(reply, type=_DecodeReply).kv_transfer_params
    except NO_JSON:
        return None


def to_wire(params: DecodeParams | DecodeCall | Receipt) -> dict[str, object]:
    """The JSON object that goes into ``kv_transfer_params``."""
    built: dict[str, object] = msgspec.to_builtins(params)
    return built


def _parse_local(params: object) -> LocalPrefill:
    said = _parse(params, LocalPrefill)
    if said.num_local_tokens > said.num_prompt_tokens:
        raise ProtocolError(
            f"transfer {said.transfer_id}: decode computes {said.num_local_tokens} tokens of a prompt of "
            f"{said.num_prompt_tokens}: run the same pdcluster everywhere"
        )
    return said


def _require_pages(reservation: Reservation) -> None:
    """Raises: ProtocolError: Blocks are not whole pages."""
    blocks, pages = reservation.block_sizes, reservation.page_sizes
    if len(blocks) != len(pages) or any(
        block and (page < 1 or block % page) for block, page in zip(blocks, pages, strict=True)
    ):
        raise ProtocolError(
            f"decode engine {reservation.remote_engine_id} has pages of {pages} tokens for blocks of {blocks}: "
            "each block must be one page or several"
        )


def _parse(params: object, kind: type[_Params]) -> _Params:
    version = params.get("version") if isinstance(params, dict) else None
    if version != PARAMS_VERSION:
        shown = version if isinstance(version, str | int | float | None) else type(version)  # may be nested too deep
        raise ProtocolError(
            f"kv_transfer_params have version {shown!r}, ours is {PARAMS_VERSION}: run the same pdcluster everywhere"
        )
    parsed: _Params | None = None
    try:
        parsed = msgspec.convert(params, kind)
        _ENCODER.encode(parsed)
    except msgspec.ValidationError as error:
        reason = odd_number(params, kind) or error
        raise ProtocolError(f"kv_transfer_params are not {kind.__name__}: {reason}") from error
    except UnicodeEncodeError as error:
        where = _HALF_A_NAME if parsed is None else _odd_text(parsed)
        raise ProtocolError(f"kv_transfer_params are not {kind.__name__}: {where}") from error
    return parsed


def _odd_text(params: msgspec.Struct) -> str:
    """A message about the field that has half of a surrogate pair. JSON can spell half a pair, but UTF-8 cannot."""
    for field in msgspec.structs.fields(params):
        try:
            _ENCODER.encode(getattr(params, field.name))
        except UnicodeEncodeError as error:
            return f"{field.name} has half a character (U+{ord(error.object[error.start]):04X}): send whole text"
    raise AssertionError("each field can be written alone, but not all of them")
