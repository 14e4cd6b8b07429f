"""The limits of a client's request: those of the settings, and what the client says of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from pdcluster_router.core.apis.openai_errors import RefusedRequest, bad_request
from pdcluster_router.core.requests.pairing import Timeouts
from pdcluster_router.settings.router_settings import Settings

TIMEOUT_HEADER: Final = b"x-request-timeout"
"""Seconds, with which a client shortens the time for its whole request."""


def timeouts_in(settings: Settings) -> tuple[Timeouts, Timeouts]:
    """The limits of a stream, and those of a request whose answer comes whole."""
    stream = Timeouts(
        settings.request_timeout_s,
        settings.prefill_timeout_s,
        settings.reservation_timeout_s,
        transfer_s=settings.first_byte_timeout_s,
        first_byte_s=settings.first_byte_timeout_s,
        idle_s=settings.idle_timeout_s,
        gone_s=settings.engine_gone_s,
    )
    return stream, replace(stream, first_byte_s=settings.whole_answer_timeout_s)


def shortened(usual: Timeouts, value: bytes) -> Timeouts:
    """``usual``, with no more time for the whole request than its client gives. ``value``: of ``TIMEOUT_HEADER``.

    Raises:
        RefusedRequest: It is no number of seconds.
    """
    seconds = _seconds(value)
    return replace(usual, request_s=seconds if usual.request_s is None else min(usual.request_s, seconds))


def _seconds(value: bytes) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        text = value.decode("latin-1")
        raise RefusedRequest(bad_request(f"X-Request-Timeout is {text!r}: give seconds above 0", "invalid_timeout"))
    return seconds
