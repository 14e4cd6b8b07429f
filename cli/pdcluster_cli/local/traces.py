"""Reads the trace lines that router and connector write. Their fields: ``docs/decisions/0001-main-job.md``.

Fields that are not named here are ignored: a trace may say more than a report needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec


class RequestTrace(msgspec.Struct, frozen=True, tag_field="event", tag="request"):
    """One request as the router saw it. Times: CLOCK_MONOTONIC seconds, None where the step did not happen."""

    transfer_id: str
    received_at: float
    status: int | None = None
    prefill_sent_at: float | None = None
    prefill_replied_at: float | None = None
    first_byte_at: float | None = None
    ended_at: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class LayerTrace(msgspec.Struct, frozen=True, array_like=True):
    """One layer of one step: when it was saved, when its write began and ended, and how much it was."""

    step: int
    layer: int
    saved_at: float
    write_begin: float
    acked_at: float
    num_bytes: int


class PushTrace(msgspec.Struct, frozen=True, tag_field="event", tag="push"):
    """One push as one prefill rank saw it. ``ranges`` and ``writes``: before and after coalescing, all layers."""

    transfer_id: str
    outcome: str
    prompt_tokens: int
    num_layers: int
    num_bytes: int
    ranges: int
    writes: int
    forward_begin: float | None
    forward_end: float | None
    layers: tuple[LayerTrace, ...]


class ReceiveTrace(msgspec.Struct, frozen=True, tag_field="event", tag="receive"):
    """One receive as one decode rank saw it."""

    transfer_id: str
    outcome: str


Trace = RequestTrace | PushTrace | ReceiveTrace
_DECODER = msgspec.json.Decoder(Trace)


def read_traces(paths: Iterable[Path]) -> list[Trace]:
    """All whole lines of all files that exist; the last line may still be written and is then left out."""
    lines: list[bytes] = []
    for path in paths:
        if path.exists():
            lines += path.read_bytes().rpartition(b"\n")[0].splitlines()
    return [_DECODER.decode(line) for line in lines]


def requests_in(traces: Iterable[Trace]) -> list[RequestTrace]:
    """The router's lines, oldest first."""
    return sorted((trace for trace in traces if isinstance(trace, RequestTrace)), key=lambda it: it.received_at)


def pushes_in(traces: Iterable[Trace], transfer_id: str) -> list[PushTrace]:
    """What prefill ranks pushed for this transfer, failed attempts included."""
    return [trace for trace in traces if isinstance(trace, PushTrace) and trace.transfer_id == transfer_id]
