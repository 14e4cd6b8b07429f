"""The spans of one push or receive that has ended: docs/decisions/0042-spans.md.

    kv_push      one push, as one prefill rank saw it; its parent is the router's call to this engine
      kv_layer   a layer of a step: from its save, over the event ``write``, to decode's acknowledgement
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

_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")
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
    """The caller's ``traceparent``, if it is valid and the caller records its trace (W3C Trace Context); else empty."""
    parent = (headers or {}).get(TRACE_HEADER, "")
    found = _PARENT.fullmatch(parent)
    return parent if found is not None and int(found[1], 16) & _SAMPLED else ""


def span_of(line: TransferLine) -> TransferSpan | None:
    """The span of what the trace line tells. None: nothing had begun."""
    return _push(line) if isinstance(line, PushTrace) else _receive(line)


def _push(line: PushTrace) -> TransferSpan | None:
    times = [time for time in _times_of(line) if time]
    if not times:
        return None
    attributes: dict[str, str | int] = {
        "pdcluster.transfer_id": str(line.transfer_id),
        "pdcluster.attempt": int(line.attempt),
        "pdcluster.decode_rank": line.decode_rank,
        "pdcluster.outcome": line.outcome,
        "pdcluster.prompt_tokens": line.prompt_tokens,
        "pdcluster.bytes": line.num_bytes,
        "pdcluster.writes": line.writes,
    }
    parts = _layers(line.layers) if len(line.layers) <= MAX_PARTS else _steps(line.layers)[:MAX_PARTS]
    error = "" if line.outcome in _ENDS_WELL else "push_failed"
    return TransferSpan("kv_push", min(times), max(times), attributes, error, parts=parts)


def _times_of(line: PushTrace) -> Iterable[float | None]:
    yield line.forward_begin
    for layer in line.layers:
        yield from (layer.saved_at, layer.write_begin, layer.acked_at)


def _layers(layers: Iterable[LayerTrace]) -> tuple[TransferSpan, ...]:
    return tuple(_layer(layer) for layer in layers)


def _layer(layer: LayerTrace) -> TransferSpan:
    attributes = {"pdcluster.step": layer.step, "pdcluster.layer": layer.layer, "pdcluster.bytes": layer.num_bytes}
    return TransferSpan("kv_layer", layer.saved_at, _end_of(layer), attributes, write_begin=layer.write_begin or None)


def _steps(layers: Iterable[LayerTrace]) -> tuple[TransferSpan, ...]:
    by_step = groupby(sorted(layers, key=_step_of), key=_step_of)
    return tuple(_step(step, list(of_step)) for step, of_step in by_step)


def _step_of(layer: LayerTrace) -> int:
    return layer.step


def _step(step: int, layers: list[LayerTrace]) -> TransferSpan:
    attributes = {
        "pdcluster.step": step,
        "pdcluster.layers": len(layers),
        "pdcluster.bytes": sum(layer.num_bytes for layer in layers),
    }
    writes = [layer.write_begin for layer in layers if layer.write_begin]
    begin, end = min(layer.saved_at for layer in layers), max(map(_end_of, layers))
    return TransferSpan("kv_step", begin, end, attributes, write_begin=min(writes, default=None))


def _end_of(layer: LayerTrace) -> float:
    return max(layer.saved_at, layer.write_begin, layer.acked_at)


def _receive(line: ReceiveTrace) -> TransferSpan | None:
    if line.expected_at is None or line.ended_at is None:
        return None
    attributes = {"pdcluster.transfer_id": str(line.transfer_id), "pdcluster.outcome": line.outcome}
    error = "" if line.outcome in _ENDS_WELL else "receive_failed"
    return TransferSpan("kv_receive", line.expected_at, max(line.expected_at, line.ended_at), attributes, error)
