"""``POST /pdcluster/verify``: an operator's order, checked, carried out, and answered.

Anybody may reach the port and a verification costs engines' time, so the order carries a pass (``Secret.mint_pass``).
The pass is made with the cluster's secret, which itself never travels; it is good for this very body, and for minutes.
EndpointSlices do not carry a pod's template, so the operator names the pods, or reads in the answer which they were.
"""

from __future__ import annotations

import time
from typing import Any, Final

import orjson
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.labels import Role
from pdcluster_router.core.openai_errors import RefusedRequest, bad_pass, bad_request, body_too_large, draining
from pdcluster_router.engines.engine import Engine
from pdcluster_router.front.router import Router
from pdcluster_router.requests.verifier import Order, Verified

VERIFY_PATH: Final = "/pdcluster/verify"
MAX_ORDER_BYTES: Final = 256 << 10
"""A thousand pods' names of 253 characters fit."""

DEFAULT_TIMEOUT_S: Final = 30.0
_SCHEME: Final = "bearer "


class VerifyOrder(BaseModel):
    """The body. Nothing else may be in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    revision: str = Field(default="", max_length=253)
    """Whose pair it is. Default: that of engines without one, as where they are named at start."""
    prefill_pods: tuple[str, ...] | None = Field(default=None, max_length=1000)
    """The prefill engine is one of these pods. Default: any of the revision."""
    decode_pods: tuple[str, ...] | None = Field(default=None, max_length=1000)
    """Likewise."""
    timeout_s: float = Field(default=DEFAULT_TIMEOUT_S, ge=1, le=120)
    """Seconds for all of it. Default 30: a new engine's first request may compile kernels."""


SCHEMA: Final[dict[str, Any]] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": VerifyOrder.model_json_schema()}}},
}
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    400: {"description": "the body is no order"},
    401: {"description": "no pass, or one that is not valid for this body, here and now"},
    409: {"description": "a request was made, and KV was not pushed"},
    413: {"description": "the body is too large"},
    429: {"description": "too many verifications run"},
    503: {"description": "an engine of the revision is missing, or this router shuts down"},
}


async def carry_out(router: Router, request: Request) -> bytes:
    """The JSON body of a 200.

    Raises:
        RefusedRequest: With what the operator is answered.
    """
    body = await _read_body(request)
    try:
        router.services.secret.check_pass(_shown(request), body, now_s=time.time())
    except ProtocolError as error:
        raise RefusedRequest(bad_pass(str(error))) from error
    order = _parse(body)
    if router.is_draining:
        raise RefusedRequest(draining())
    return _written(order.revision, await router.verifier.verify(order))


async def _read_body(request: Request) -> bytes:
    """No more of it than an order may have."""
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


def _parse(body: bytes) -> Order:
    try:
        order = VerifyOrder.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise RefusedRequest(bad_request(f"{where}: {first['msg']}", "invalid_order")) from error
    named = {Role.PREFILL: order.prefill_pods, Role.DECODE: order.decode_pods}
    pods = {role: frozenset(names) for role, names in named.items() if names is not None}
    return Order(order.revision, order.timeout_s, pods)


def _written(revision: str, verified: Verified) -> bytes:
    asked = verified.asked
    return orjson.dumps(
        {
            "verified": True,
            "revision": revision,
            "prefill": _engine(verified.pair.prefill),
            "decode": _engine(verified.pair.decode),
            "prompt_tokens": asked.num_prompt_tokens,
            "pushed_tokens": asked.num_tokens,
            "block_tokens": asked.block_tokens,
            "is_content_compared": True,
            "transfer_protocol": verified.transfer_protocol,
            "seconds": round(verified.seconds, 3),
        }
    )


def _engine(engine: Engine) -> dict[str, str]:
    return {"name": engine.name, "pod": engine.pod}
