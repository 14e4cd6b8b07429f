"""A request whose bytes a gateway carries: which of its terms are other ones than for a client of our own.

The gateway has sent the request when the router learns how its engine answers, so one decode engine is asked. Where
answers go by unread, an unfinished one cannot be told from a whole one, and silence not from a busy engine.
vLLM sends a stream's head before it knows that the request works. So the router counts such a stream as begun only when
it ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec

from pdcluster_protocol.metaserver import Action
from pdcluster_router.core.apis.openai_errors import RefusedRequest
from pdcluster_router.core.engines.placement import RequestFacts
from pdcluster_router.core.requests.gateway_headers import endpoint_of, is_among
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.roster import Terms
from pdcluster_router.http.cycle_ends import CycleOwner
from pdcluster_router.http.gateway import Gateway
from pdcluster_router.requests.exchange import Exchange
from pdcluster_router.requests.request import ClientRequest

UNREAD_IDLE_S: Final = 86_400.0
"""Seconds without a byte of an answer that goes by unread: the gateway limits it by itself, this only ends what it has
forgotten."""
_UNREAD: Final = (
    "answers of this API do not show that their engine gave them up, and this gateway's go past the router "
    "(response_body_mode NONE)"
)


def for_gateway(request: ClientRequest, gateway: Gateway, whole_answer_s: float) -> ClientRequest:
    """The same request, on the terms of its gateway. ``whole_answer_s``: seconds until an answer must be whole that the
    router learns of only then.

    Raises:
        RefusedRequest: The answer would go by unread, and its API does not show its client that it is broken.
    """
    retries = replace(request.terms.retries, max_decode_attempts=1)
    place = partial(_placed, request.terms, gateway.endpoints)
    request = msgspec.structs.replace(
        request, gateway=gateway, terms=replace(request.terms, place_decode=place, retries=retries)
    )
    if gateway.carries_answer:
        return request
    if not request.api.shows_broken and request.api.not_served is not None:
        raise RefusedRequest(request.api.not_served(_UNREAD))
    return msgspec.structs.replace(
        request,
        api=replace(request.api, unfinished=None),
        timeouts=replace(request.timeouts, first_byte_s=whole_answer_s, idle_s=UNREAD_IDLE_S),
    )


def may_be_whole(owner: CycleOwner | None) -> bool:
    """Whether an answer that went by unread, and has ended, may be whole; False: its prefill still ran, or its request
    was never sent. ``owner``: the one that works on the answer."""
    if not isinstance(owner, Exchange):
        return False
    calls, outcome = owner.calls, owner.calls.outcome
    if calls.reservation is None:
        return True
    return outcome is not None and (outcome.is_ok or outcome.action is Action.RECOMPUTE)


def may_get(engine: Engine, endpoints: frozenset[str] | None) -> bool:
    """Whether a gateway that allows ``endpoints`` can be told this engine."""
    return is_among(endpoint_of(engine.url), endpoints)


def _placed(
    terms: Terms, endpoints: frozenset[str] | None, request: RequestFacts, tried: Collection[Engine]
) -> Engine | None:
    if endpoints is None:
        engine = terms.place_decode(request, tried)
        if engine is None or may_get(engine, endpoints):
            return engine
    return terms.place_decode(request, Barred(tried, endpoints))


@dataclass(frozen=True, slots=True)
class Barred(Collection[Engine]):
    """Engines that were tried, and all that the gateway does not allow."""

    tried: Collection[Engine]
    endpoints: frozenset[str] | None

    def __contains__(self, engine: object) -> bool:
        return isinstance(engine, Engine) and (engine in self.tried or not may_get(engine, self.endpoints))

    def __iter__(self) -> Iterator[Engine]:
        return iter(self.tried)

    def __len__(self) -> int:
        return 1 + len(self.tried)
