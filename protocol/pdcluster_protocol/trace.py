"""The lines of a trace file: JSON, one for each request, push or receive that has ended.

Times are seconds of CLOCK_MONOTONIC, so that files of several processes on one machine can be compared; null where a
step did not happen. A reader ignores fields that it does not know.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from pdcluster_protocol.ids import Attempt, RequestId, TransferId


class RequestTrace(msgspec.Struct, kw_only=True, tag_field="event", tag="request"):
    """One request as the router saw it. Its exchange fills it in."""

    transfer_id: TransferId
    request_id: str = ""
    """The client's own, or the router's."""
    received_at: float
    reserved_at: float | None = None
    prefill_sent_at: float | None = None
    prefill_replied_at: float | None = None
    first_byte_at: float | None = None
    """First body byte from decode."""
    ended_at: float | None = None
    """When the client's answer ended, or the client left."""
    status: int | None = None
    """HTTP status that the client got; null when it left before."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that decode had in its prefix cache, in [0, prompt_tokens]."""
    client: str = ""
    """As in the access log; empty: the router asks for no key and no token."""


class LayerTrace(msgspec.Struct, frozen=True, array_like=True):
    """One layer of one step, or one region of it where it has several in KV memory: when it was saved, when its write
    began and ended, and how many bytes were written.

    ``write_begin`` and ``acked_at`` are 0 where that did not happen.
    """

    step: int
    layer: int
    saved_at: float
    write_begin: float
    acked_at: float
    num_bytes: int


class PushTrace(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="push"):
    """One push as one prefill rank saw it. ``ranges``: pieces of all layers. ``writes``: the writes made of them."""

    transfer_id: TransferId
    request_id: RequestId = RequestId("")
    attempt: Attempt = Attempt(1)
    decode_rank: int = 0
    """The decode rank that it went to, among all ranks of its engine."""
    outcome: str
    """``done``, ``failed``, or ``unneeded``: decode had it all."""
    reason: str = ""
    """Why it failed."""
    prompt_tokens: int
    num_layers: int
    num_bytes: int
    """The bytes that decode's transport has acknowledged."""
    is_content_compared: bool = False
    ranges: int
    writes: int
    forward_begin: float | None
    forward_end: float | None
    """0: the push failed, or was found unneeded, before the forward pass ended."""
    ended_at: float | None = None
    """When all of it was over: its writes, the comparison of its content and, if it went well, its forward pass."""
    layers: tuple[LayerTrace, ...]


class ReceiveTrace(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="receive"):
    """One receive as one decode rank saw it."""

    transfer_id: TransferId
    request_id: RequestId = RequestId("")
    outcome: str
    """``received`` or ``failed``."""
    reason: str = ""
    """Why it failed."""
    is_content_compared: bool = False
    expected_at: float | None = None
    ended_at: float | None = None


TraceLine: TypeAlias = RequestTrace | PushTrace | ReceiveTrace
