"""The spans of one push or receive that has ended: docs/decisions/0042-spans.md.

    kv_push      one push, as one prefill rank saw it, until all of it is over; its parent is the router's call
      kv_layer   a layer of a step that was written: from its save until its last byte is acknowledged. The event
                 ``write`` is the begin of its first write. A layer in several regions of KV memory has one for each
    kv_receive   one receive, as one decode rank saw it: from the reservation until the KV is there, or will not come

A push of many layers and steps has a span for each step instead, so that a long prompt does not fill a collector.
No span has a reason, a prompt or an address. Knows no clock and no encoding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeAlias

from pdcluster_protocol.trace import LayerTrace, PushTrace, ReceiveTrace

TransferLine: TypeAlias = PushTrace | ReceiveTrace
TRACE_HEADER: Final = "traceparent"
MAX_PARTS: Final = 256
"""Spans below one push. vLLM's exporter holds 2,048 spans of a process (OpenTelemetry's default) and drops others."""

_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")
_SAMPLED: Final = 1
_ENDS_WELL: Final = frozenset(("done", "unneeded", "received"))


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """One span. Times are monotonic seconds, with ``begin`` <= ``end``."""

    name: str
    begin: float
    end: float
    attributes: Mapping[str, str | int]
    error: str = ""
    """The kind of failure that it ended with; empty: it ended well."""
    write_begin: float | None = None
    """The moment of the event ``write``; None: there is none."""
    parts: tuple[TransferSpan, ...] = ()


def sampled_parent(headers: Mapping[str, str] | None) -> str:
    """The caller's ``traceparent``, if it is valid and the caller records its trace (W3C Trace Context); else empty.

    Without what a later version of it may add: 55 characters at most.
    """
    parent = (headers or {}).get(TRACE_HEADER)
    found = _PARENT.match(parent) if isinstance(parent, str) else None
    if found is None or not int(found[1], 16) & _SAMPLED:
        return ""
    return found[0] if _may_be_followed(found) else ""


def _may_be_followed(found: re.Match[str]) -> bool:
    """Whether nothing follows, or what a version after 00 may add."""
    rest = found.string[found.end() :]
    return not rest or (rest[0] == "-" and not found[0].startswith("00"))


def span_of(line: TransferLine) -> TransferSpan | None:
    """The span of what the trace line tells. None: nothing had begun."""
    return _push(line) if isinstance(line, PushTrace) else _receive(line)


def _push(line: PushTrace) -> TransferSpan | None:
    times = [time for time in _times_of(line) if time]
    if not times:
        return None
    end, written = max(times), [layer for layer in line.layers if layer.write_begin]
    attributes: dict[str, str | int] = {
        "pdcluster.transfer_id": str(line.transfer_id),
        "pdcluster.attempt": int(line.attempt),
        "pdcluster.decode_rank": line.decode_rank,
        "pdcluster.outcome": line.outcome,
        "pdcluster.prompt_tokens": line.prompt_tokens,
        "pdcluster.bytes": line.num_bytes,
        "pdcluster.writes": line.writes,
        "pdcluster.steps": len({layer.step for layer in line.layers}),
    }
    parts = _layers(written, end) if len(written) <= MAX_PARTS else _steps(written, end)[:MAX_PARTS]
    error = "" if line.outcome in _ENDS_WELL else "push_failed"
    return TransferSpan("kv_push", min(times), end, attributes, error, parts=parts)


def _times_of(line: PushTrace) -> Iterable[float | None]:
    yield from (line.forward_begin, line.ended_at)
    for layer in line.layers:
        yield from (layer.saved_at, layer.write_begin, layer.acked_at)


def _layers(layers: Iterable[LayerTrace], end: float) -> tuple[TransferSpan, ...]:
    return tuple(_layer(layer, end) for layer in layers)


def _layer(layer: LayerTrace, end: float) -> TransferSpan:
    attributes = {"pdcluster.step": layer.step, "pdcluster.layer": layer.layer, "pdcluster.bytes": layer.num_bytes}
    return TransferSpan("kv_layer", *_lasts([layer], end), attributes, _error_of([layer]), layer.write_begin)


def _steps(layers: Iterable[LayerTrace], end: float) -> tuple[TransferSpan, ...]:
    by_step = groupby(sorted(layers, key=_step_of), key=_step_of)
    return tuple(_step(step, list(of_step), end) for step, of_step in by_step)


def _step_of(layer: LayerTrace) -> int:
    return layer.step


def _step(step: int, layers: list[LayerTrace], end: float) -> TransferSpan:
    attributes = {
        "pdcluster.step": step,
        "pdcluster.layers": len(layers),
        "pdcluster.bytes": sum(layer.num_bytes for layer in layers),
    }
    write_begin = min(layer.write_begin for layer in layers)
    return TransferSpan("kv_step", *_lasts(layers, end), attributes, _error_of(layers), write_begin)


def _lasts(layers: list[LayerTrace], end: float) -> tuple[float, float]:
    """From the first save to the last acknowledgement, or to the push's own end without one."""
    begin = min(min(layer.saved_at, layer.write_begin) for layer in layers)
    return begin, max(max(layer.saved_at, layer.write_begin, layer.acked_at or end) for layer in layers)


def _error_of(layers: list[LayerTrace]) -> str:
    return "" if all(layer.acked_at for layer in layers) else "unacknowledged"


def _receive(line: ReceiveTrace) -> TransferSpan | None:
    if line.expected_at is None or line.ended_at is None:
        return None
    attributes = {"pdcluster.transfer_id": str(line.transfer_id), "pdcluster.outcome": line.outcome}
    error = "" if line.outcome in _ENDS_WELL else "receive_failed"
    return TransferSpan("kv_receive", line.expected_at, max(line.expected_at, line.ended_at), attributes, error)
