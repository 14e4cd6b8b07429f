"""Engines that run vllm-ascend's own layerwise connector, as released, and how the router must treat them.

Source of truth: vllm-ascend 0.23.0.post1, ``mooncake_layerwise_connector.py`` and ``recompute_scheduler.py``, and the
scheduler of vLLM 0.23. These facts follow from them:

- Decode does not read the metaserver's answer, and has no timeout. So the router ends a request whose prefill has
  failed: it closes the connection to decode.
- Decode counts which prefill ranks have said "done", by address, and not which attempt they belong to. Ranks of two
  attempts together can look complete. So a reservation is used again only if the call to prefill surely reached no
  engine. Otherwise the whole request is sent again, under a new id.
- Decode frees the blocks of a request that ended while it waited only when prefill says "done". An aborted prefill
  never says so. So a call to prefill is not aborted; it may run to its end, within a limit.
- A decode engine with ``recompute_scheduler_enable`` gives a request back instead of preempting it. That request cannot
  be continued exactly: prompt and text so far, tokenized again, may be other tokens. So the router answers an error.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import msgspec

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.params import DecodeParams
from pdcluster_protocol.vllm_ascend import LayerwiseParams, parse_layerwise_reservation, request_id_in
from pdcluster_router.core.apis.rewrite import Bytes
from pdcluster_router.core.apis.sse import GAVE_UP
from pdcluster_router.core.engines.breaker import Blame
from pdcluster_router.core.requests.dialect import BAD_REQUEST, NOT_FOUND, BadCall, LayerwiseCall, Posted
from pdcluster_router.core.requests.pairing import Event, Retries

RECOMPUTED: Final = b'"stop_reason":"recomputed"'
"""vLLM writes JSON without spaces. An answer that ended at a client's stop word ``recomputed`` looks the same, and
fails too."""
_GAVE_BACK: Final = (
    'it ran out of KV blocks and gave the request back (stop_reason "recomputed"), which cannot be continued exactly: '
    "start decode engines without recompute_scheduler_enable, or with more KV memory"
)
_ID: Final = re.compile(r"chatcmpl-([0-9a-f]{32})|cmpl-([0-9a-f]{32})-0")
"""A list of several prompts is never sent with transfer parameters, so there is one prompt, of index 0."""


class VllmAscendDialect:
    """Engines of vllm-ascend 0.23 with ``MooncakeLayerwiseConnector``."""

    given_up: Mapping[bytes, str] = MappingProxyType({**GAVE_UP, RECOMPUTED: _GAVE_BACK})
    no_proof = "engines of vllm-ascend's own connector write no receipt of what was pushed: nothing can be verified"
    gives_back_unseen = (
        "answers of this API do not show that an engine of vllm-ascend gave a request back, "
        "and this router's engines may do so"
    )
    prefill_goes_on = True
    must_hold_call = False

    def client_line(self, request_id: bytes) -> bytes:  # noqa: ARG002  # the transfer's id is in its place
        return b""

    def transfer_line(self, transfer_id: TransferId) -> bytes:
        """The router makes this id: it alone tells the engines which of their requests belong together."""
        return b"x-request-id: %b\r\n" % transfer_id.encode()

    def retries(self, wanted: Retries) -> Retries:
        """Decode waits for the push for ever: it never computes the prompt by itself."""
        return replace(wanted, recomputes=False)

    def decode_params(self, params: DecodeParams) -> bytes:
        return msgspec.json.encode(LayerwiseParams(metaserver=params.metaserver))

    def prefill_params(self, reservation: Posted, attempt: Attempt, left_ms: int) -> bytes:  # noqa: ARG002  # has neither
        assert isinstance(reservation, LayerwiseCall), "another dialect's"
        return reservation.posted

    def call_in(
        self,
        seal: bytes,  # noqa: ARG002  # these engines make none
        body: Bytes,
        known: Container[TransferId],
    ) -> LayerwiseCall | None:
        """The caller shows no secret. It shows a transfer id that only the engines were told."""
        try:
            transfer_id = transfer_id_of(request_id_in(body))
        except ProtocolError as error:
            raise BadCall(BAD_REQUEST, str(error)) from error
        if transfer_id not in known:
            raise BadCall(NOT_FOUND, f"transfer {transfer_id} is not known here, or has ended", transfer_id)
        try:
            said = parse_layerwise_reservation(body)
        except ProtocolError as error:
            raise BadCall(BAD_REQUEST, str(error), transfer_id) from error
        if not said.remote_block_ids:
            return None
        num_tokens = max(said.max_prompt_tokens, said.remote_cached_tokens + 1)
        return LayerwiseCall(
            transfer_id=transfer_id,
            posted=bytes(body),
            num_prompt_tokens=num_tokens,
            remote_cached_tokens=said.remote_cached_tokens,
        )

    def spoils(self, event: Event, blame: Blame) -> bool:
        """``PERHAPS``: an engine had the call, and may have pushed a part. So may an engine that is too slow."""
        return event is Event.PREFILL_TIMED_OUT or blame is Blame.PERHAPS


def transfer_id_of(request_id: str) -> TransferId:
    """R in ``chatcmpl-R`` or ``cmpl-R-0``.

    Raises:
        ProtocolError: It is no id of this router's making.
    """
    found = _ID.fullmatch(request_id)
    if found is None:
        raise ProtocolError(
            f"request_id {request_id[:80]!r} is not chatcmpl-ID or cmpl-ID-0 with an ID of this router: "
            "decode engines must take the id from X-Request-Id, as vLLM 0.23 does"
        )
    return TransferId(found[1] or found[2])
