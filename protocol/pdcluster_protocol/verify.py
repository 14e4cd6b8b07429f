"""``POST /pdcluster/verify`` of a router's internal port: which pair is to be verified, and what was proven. JSON.

The order carries a pass for exactly its bytes (``Secret.mint_pass``). A router refuses an order with a field that it
does not know, since it could not do what the field asks. A reader of the answer ignores fields that it does not know.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from pdcluster_protocol.errors import NO_JSON, ProtocolError
from pdcluster_protocol.labels import Role

VERIFY_PATH: Final = "/pdcluster/verify"
MAX_ORDER_BYTES: Final = 256 << 10
"""A thousand pods' names of 253 characters fit."""

PodNames: TypeAlias = Annotated[tuple[str, ...], Meta(max_length=1000)]


class VerifyOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order to verify one revision."""

    revision: Annotated[str, Meta(max_length=253)] = ""
    """The revision of the pair. Default: none, for engines that the router's flags name."""
    prefill_pods: PodNames | None = None
    """The prefill engine is one of these pods. Default: any of the revision."""
    decode_pods: PodNames | None = None
    """The decode engine is one of these pods. Default: any of the revision."""
    timeout_s: Annotated[float, Meta(ge=1, le=120)] = 30.0
    """Seconds for all of it, in [1, 120]. Default 30: a new engine's first request may compile kernels."""

    def pods(self, role: Role) -> frozenset[str] | None:
        """The pods of which one must be the engine of this role; None: any pod."""
        named = self.prefill_pods if role is Role.PREFILL else self.decode_pods
        return None if named is None else frozenset(named)


class VerifiedEngine(msgspec.Struct, frozen=True):
    """One engine of the pair. ``name``: the router's name for it. ``pod``: empty outside of Kubernetes."""

    name: str
    pod: str


class VerifyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a 200: what one request has proven. Every other answer is an error in OpenAI's format."""

    verified: bool = True
    revision: str
    prefill: VerifiedEngine
    decode: VerifiedEngine
    prompt_tokens: int
    """Prompt tokens of the request, in [1, inf)."""
    pushed_tokens: int
    """Prompt tokens that decode received whole, in [1, prompt_tokens]."""
    block_tokens: int
    """Tokens in the largest block of decode's KV groups."""
    is_content_compared: bool = True
    transfer_protocol: str
    """The protocol by which the bytes came, as decode says: ``tcp``, ``rdma`` or ``ascend``."""
    seconds: float
    """Duration of the whole verification."""


def parse_order(body: bytes) -> VerifyOrder:
    """The order in ``body``.

    Raises:
        ProtocolError: The body is no valid order. The message names the field and its bound.
    """
    try:
        return msgspec.json.decode(body, type=VerifyOrder)
    except NO_JSON as error:
        what, _, where = str(error).partition(" - at `$.")
        raise ProtocolError(f"{where.rstrip('`') or 'the body'}: {what}") from error
