"""The messages of vllm-ascend 0.23.0.post1's own ``MooncakeLayerwiseConnector``, and the answers that it must get.

    router --LayerwiseParams--> decode --LayerwiseReservation--> metaserver --the same bytes--> prefill

Source of truth: its ``mooncake_layerwise_connector.py``, class ``MooncakeLayerwiseConnectorScheduler``. Neither message
has a version, a token or a transfer id: decode's id of the request pairs engines. The router hands the bytes on as they
came, so fields that a later release adds reach prefill. It reads the fields below only.
"""

from __future__ import annotations

import msgspec

from pdcluster_protocol.bounds import Count, CountOrNone, Index, Port, Side, odd_number
from pdcluster_protocol.errors import NO_JSON, ProtocolError


class LayerwiseParams(msgspec.Struct, frozen=True, kw_only=True):
    """Router to decode engine."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = True
    metaserver: str
    """URL of the metaserver in the very router process that owns the request."""


class LayerwiseReservation(msgspec.Struct, frozen=True, kw_only=True):
    """Decode to metaserver, and on to prefill."""

    request_id: str
    """Decode's id as its API layer knows it: ``chatcmpl-R`` or ``cmpl-R-INDEX``, R from ``X-Request-Id``. Prefill names
    this id to decode's workers when it has pushed, so prefill must run the request under the same id."""
    do_remote_prefill: bool
    do_remote_decode: bool
    remote_block_ids: tuple[tuple[Index, ...], ...]
    """Per KV cache group. No group at all: decode has all KV that it would load, and does not wait."""
    remote_block_size: tuple[Count, ...]
    """Tokens in a block of each KV group."""
    remote_engine_id: str
    remote_host: str
    remote_port: Port
    remote_tp_size: Side
    remote_pcp_size: Side
    remote_dcp_size: Side
    remote_cached_tokens: CountOrNone

    @property
    def max_prompt_tokens(self) -> int:
        """The fewest tokens that the reserved blocks of any group hold: at least the prompt's, in whole blocks. A group
        of recurrent state may hold fewer. 0: there are no groups."""
        sizes = zip(self.remote_block_ids, self.remote_block_size, strict=False)  # No group, or one for each size.
        return min((len(ids) * size * self.remote_dcp_size for ids, size in sizes), default=0)


class _NamedRequest(msgspec.Struct, frozen=True):
    request_id: str


def request_id_in(body: bytes | bytearray) -> str:
    """The id in a posted body. The rest is not read: it may be large, and its sender is not known yet.

    Raises:
        ProtocolError: The body has none.
    """
    try:
        return msgspec.json.decode(body, type=_NamedRequest).request_id
    except NO_JSON as error:
        raise ProtocolError(f"the call names no request_id: {error}") from error


def parse_layerwise_reservation(body: bytes | bytearray) -> LayerwiseReservation:
    """Decode's reservation, in the form of vllm-ascend 0.23.

    Raises:
        ProtocolError: The body is no JSON, a name is missing, a value is of another type or out of bounds, or fields
            do not fit together.
    """
    try:
        parsed = msgspec.json.decode(body, type=LayerwiseReservation)
    except msgspec.ValidationError as error:
        reason = _odd_number_in(body) or error
        raise ProtocolError(f"this is no reservation of vllm-ascend 0.23: {reason}") from error
    except NO_JSON as error:
        raise ProtocolError(f"this is no JSON: {error}") from error
    _check(parsed)
    return parsed


def _odd_number_in(body: bytes | bytearray) -> str:
    try:
        return odd_number(msgspec.json.decode(body), LayerwiseReservation)
    except NO_JSON:
        return ""


def _check(said: LayerwiseReservation) -> None:
    """Raises: ProtocolError: The fields of ``said`` do not fit together."""
    name = f"decode engine {said.remote_engine_id!r}"
    if said.do_remote_prefill or not said.do_remote_decode:
        raise ProtocolError(f"{name} does not ask a prefill engine for KV: do_remote_decode must be true")
    if not said.remote_engine_id or not said.remote_host:
        raise ProtocolError(f"{name} at {said.remote_host!r} must name its engine id and its host")
    num_groups = len(said.remote_block_ids)
    if num_groups and num_groups != len(said.remote_block_size):
        raise ProtocolError(
            f"{name} has {num_groups} block tables for {len(said.remote_block_size)} block sizes: "
            "it must name one for each KV group"
        )
    if num_groups and not any(said.remote_block_ids):
        raise ProtocolError(f"{name} has reserved no block: there is nothing to push to")
