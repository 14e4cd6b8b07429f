"""How a request ends, should it end now, and the words for what it was doing. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdcluster_protocol.metaserver import PrefillOutcome, failed
from pdcluster_router.core.openai_errors import NO_DECODE, ApiError, no_engine
from pdcluster_router.core.pairing import Phase
from pdcluster_router.requests.relay import DecodeRefusal
from pdcluster_router.telemetry import metrics


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the request ends, should it end now: what decode, the client and the metrics are told."""

    outcome: PrefillOutcome
    error: ApiError | DecodeRefusal
    result: metrics.Outcome


UNDECIDED: Final = Verdict(failed("the request has ended"), no_engine("decode", NO_DECODE), metrics.Outcome.UNAVAILABLE)

NOT_DECODES_FAULT: Final = frozenset((Phase.PREFILLING, Phase.ANSWERING, Phase.DECODING, Phase.TRAILING))
"""Decode waits for prefill, or has begun its answer, when the request's time is over."""

DOING: Final = {
    Phase.AWAITING_RESERVATION: "waiting for the decode engine",
    Phase.PREFILLING: "waiting for the prefill engine",
    Phase.AWAITING_ANSWER: "waiting for decode's answer",
    Phase.LOCAL_PREFILL: "waiting for decode's own prefill",
    Phase.ANSWERING: "decoding",
    Phase.DECODING: "decoding",
    Phase.TRAILING: "waiting for prefill's reply",
}


def is_overloaded(refusal: DecodeRefusal) -> bool:
    """Whether decode is only overloaded: it answered 503 with ``Retry-After``."""
    return refusal.status == 503 and b"retry-after:" in refusal.headers.lower()
