"""Envoy's messages of external processing, to and from the plain values of ``core/requests/consultation.py``."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from pdcluster_protocol.errors import ProtocolError
from pdcluster_router.core.apis.request_head import Headers
from pdcluster_router.core.requests.consultation import (
    BodyMode,
    BodyModes,
    BodyReply,
    ErrorReply,
    GatewayBody,
    GatewayHead,
    GatewayMessage,
    GatewayReply,
    GatewaySide,
    GatewayTrailers,
    HeadReply,
    TrailersReply,
)
from pdcluster_router.core.requests.gateway_headers import (
    ENDPOINT_KEY,
    ENDPOINT_SPACE,
    HeaderChanges,
    endpoints_in,
)
from pdcluster_router.front.picker.messages import APPEND, OVERWRITE, ProcessingResponse

_NAMES: Final = {GatewaySide.REQUEST: "request", GatewaySide.ANSWER: "response"}
_SIDES: Final = {f"{name}_{part}": side for side, name in _NAMES.items() for part in ("headers", "body", "trailers")}


def message_in(said: Any) -> GatewayMessage:
    """The message that a gateway sends. ``said``: a ``ProcessingRequest``.

    Raises:
        ProtocolError: It is nothing that this picker knows.
    """
    kind = said.WhichOneof("choice")
    if kind is None:
        raise ProtocolError("the gateway sends a message without content")
    side, part = _SIDES[kind], getattr(said, kind)
    if kind.endswith("_headers"):
        endpoints = endpoints_in(_metadata_in(said)) if side is GatewaySide.REQUEST else None
        return GatewayHead(side, _headers_in(part.headers), part.end_of_stream, endpoints, _modes_in(said))
    if kind.endswith("_body"):
        return GatewayBody(side, part.body, part.end_of_stream)
    return GatewayTrailers(side)


def message_of(reply: GatewayReply) -> Any:
    """The ``ProcessingResponse`` that says it."""
    message = ProcessingResponse()
    if isinstance(reply, ErrorReply):
        _write_error(message.immediate_response, reply)
        return message
    part = getattr(message, f"{_NAMES[reply.side]}_{_PARTS[type(reply)]}")
    part.SetInParent()
    if isinstance(reply, TrailersReply):
        return message
    _write_changes(part.response.header_mutation, reply.changes)
    if isinstance(reply, BodyReply):
        _write_body(part.response, reply)
    if reply.endpoint:
        _write(part.response.header_mutation, ENDPOINT_KEY, reply.endpoint.encode(), OVERWRITE)
        message.dynamic_metadata.update({ENDPOINT_SPACE: {ENDPOINT_KEY: reply.endpoint}})
    return message


_PARTS: Final[dict[type[GatewayReply], str]] = {HeadReply: "headers", BodyReply: "body", TrailersReply: "trailers"}


def _headers_in(headers: Any) -> Headers:
    return [(one.key.lower().encode("latin-1"), one.raw_value or one.value.encode()) for one in headers.headers]


def _metadata_in(said: Any) -> dict[str, object]:
    return {space.key: MessageToDict(space.value) for space in said.metadata_context.filter_metadata}


def _modes_in(said: Any) -> BodyModes | None:
    """Raises: ProtocolError: A mode of a newer Envoy, such as GRPC."""
    if not said.HasField("protocol_config"):
        return None
    modes = said.protocol_config
    try:
        return BodyModes(BodyMode(modes.request_body_mode), BodyMode(modes.response_body_mode))
    except ValueError as error:
        raise ProtocolError(f"the gateway's body mode is not known here: {error}: set FULL_DUPLEX_STREAMED") from error


def _write_body(common: Any, reply: BodyReply) -> None:
    if reply.body is None:
        return
    if not reply.is_piece:
        common.body_mutation.body = bytes(reply.body)
        return
    piece = common.body_mutation.streamed_response
    piece.SetInParent()
    piece.body = bytes(reply.body)
    piece.end_of_stream = reply.is_last


def _write_error(message: Any, error: ErrorReply) -> None:
    message.status.code = error.status
    message.body = error.body
    message.details = "pdcluster"
    _write_changes(message.headers, HeaderChanges(tuple(error.headers)))


def _write_changes(mutation: Any, changes: HeaderChanges) -> None:
    seen: set[bytes] = set()
    for name, value in changes.set:
        _write(mutation, name.decode("latin-1"), value, APPEND if name in seen else OVERWRITE)
        seen.add(name)
    mutation.remove_headers.extend(name.decode("latin-1") for name in changes.remove)


def _write(mutation: Any, name: str, value: bytes, action: int) -> None:
    option = mutation.set_headers.add()
    option.header.key, option.header.raw_value = name, value
    option.append_action = action
