"""``POST /pdcluster/verify``: checks an operator's order, carries it out, and answers it.

Any machine may reach the port, and a verification costs engines' time. So an order needs a pass (``Secret.mint_pass``).
The pass is made with the cluster's secret, which itself never travels; it is valid for this body only, and for minutes.
EndpointSlices do not carry a pod's template, so the operator names the pods, or reads their names in the answer.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
from fastapi import Request

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.verify import MAX_ORDER_BYTES, VerifyOrder, parse_order
from pdcluster_router.core.apis.openai_errors import RefusedRequest, bad_pass, bad_request, body_too_large, draining
from pdcluster_router.front.router import Router

_SCHEME: Final = "bearer "
_SCHEMAS: Final = msgspec.json.schema_components((VerifyOrder,))[1]
SCHEMA: Final[dict[str, Any]] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMAS[VerifyOrder.__name__]}}},
}
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    400: {"description": "the body is no order"},
    401: {"description": "no pass, or one that is not valid for this body, here and now"},
    409: {"description": "a request was made, and KV was not pushed"},
    413: {"description": "the body is too large"},
    429: {"description": "too many verifications run"},
    501: {"description": "the engines of this router's dialect cannot prove a push"},
    503: {"description": "an engine of the revision is missing, or this router shuts down"},
}


async def carry_out(router: Router, request: Request) -> bytes:
    """The JSON body of a 200.

    Raises:
        RefusedRequest: It holds the error for the operator.
    """
    body = await _read_body(request)
    try:
        router.services.secret.check_pass(_shown(request), body, now_s=time.time())
    except ProtocolError as error:
        raise RefusedRequest(bad_pass(str(error))) from error
    try:
        order = parse_order(body)
    except ProtocolError as error:
        raise RefusedRequest(bad_request(str(error), "invalid_order")) from error
    if router.is_draining:
        raise RefusedRequest(draining())
    try:
        return msgspec.json.encode(await router.verifier.verify(order))
    except RefusedRequest as refused:
        if router.is_draining:  # It may have stopped the request itself: that says nothing of KV.
            raise RefusedRequest(draining()) from refused
        raise


async def _read_body(request: Request) -> bytes:
    """The body. Raises: RefusedRequest: It is larger than an order may be."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_ORDER_BYTES:
            raise RefusedRequest(body_too_large(MAX_ORDER_BYTES))
    return bytes(body)


def _shown(request: Request) -> str:
    """The pass that the request shows; empty when it shows none."""
    header = request.headers.get("authorization", "")
    return header[len(_SCHEME) :].strip() if header[: len(_SCHEME)].lower() == _SCHEME else ""
