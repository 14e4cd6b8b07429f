"""Prefill's words to the router, in the ``kv_transfer_params`` of its answer.

    {"pdcluster_queued_s": 0.12, "pdcluster_computed_s": 0.7}     the prompt is pushed
    {"pdcluster_reason": "...", ...}                              it was computed but not pushed

A request that no step has computed has no times, and engines of an older release tell none.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdcluster_protocol.errors import NO_JSON


class PrefillAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Any field may be absent."""

    pdcluster_reason: str = ""
    """Why nothing was pushed; empty: it was."""
    pdcluster_queued_s: float | None = None
    """Seconds in the queue of the engine's scheduler."""
    pdcluster_computed_s: float | None = None
    """Seconds from the schedule of its first step until the scheduler knew the end of its last one."""

    def to_wire(self) -> dict[str, object]:
        """The JSON object that goes into ``kv_transfer_params``."""
        built: dict[str, object] = msgspec.to_builtins(self)
        return built


NOTHING_SAID: Final = PrefillAnswer()


def prefill_answer_in(reply: bytes | bytearray) -> PrefillAnswer:
    """Prefill's words in the JSON body of its answer; empty ones if it has none that can be read.

    Times that cannot be read hide no refusal.
    """
    try:
        return _REPLY.decode(reply).kv_transfer_params or NOTHING_SAID
    except NO_JSON:
        return _reason_in(reply)


def _reason_in(reply: bytes | bytearray) -> PrefillAnswer:
    try:
        refusal = _REASON.decode(reply).kv_transfer_params
    except NO_JSON:
        return NOTHING_SAID
    return NOTHING_SAID if refusal is None else PrefillAnswer(refusal.pdcluster_reason)


class _EngineReply(msgspec.Struct):
    kv_transfer_params: PrefillAnswer | None = None


class _ReasonAlone(msgspec.Struct):
    pdcluster_reason: str = ""


class _RefusingReply(msgspec.Struct):
    kv_transfer_params: _ReasonAlone | None = None


_REPLY: Final = msgspec.json.Decoder(_EngineReply)
_REASON: Final = msgspec.json.Decoder(_RefusingReply)
