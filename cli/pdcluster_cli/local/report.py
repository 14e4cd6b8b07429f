"""Reports one request's transfer from the traces of router and connector (``pdcluster_protocol/trace.py``).

received_at      prefill_sent_at          prefill_replied_at        first_byte_at
    |------------------|-------- prefill --------|------- ... -----------|
    |------------------------------- TTFT -------------------------------|
hand-over = TTFT - prefill: everything but prefill's own response time. A good push makes it small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from pdcluster_protocol.trace import LayerTrace, PushTrace, RequestTrace, TraceLine

_DECODER: Final[msgspec.json.Decoder[TraceLine]] = msgspec.json.Decoder(TraceLine)


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One transfer in numbers. Times in seconds; None: a trace lacks the moment."""

    prompt_tokens: int
    cached_tokens: int
    num_layers: int
    """Layers of the prefill rank that has most: a rank has only those of its pipeline stage."""
    num_bytes: int
    ranges: int
    """Block ranges over all layers, before coalescing."""
    writes: int
    """Writes after coalescing."""
    ttft_s: float | None
    prefill_s: float | None
    hidden_share: float | None
    """Share of the pushed bytes that was acknowledged before the forward pass ended, in [0, 1]."""

    @property
    def hand_over_s(self) -> float | None:
        if self.ttft_s is None or self.prefill_s is None:
            return None
        return self.ttft_s - self.prefill_s


def read_traces(paths: Iterable[Path]) -> list[TraceLine]:
    """All whole lines of all files that exist. A last line without its end, which is still written, is left out."""
    lines: list[bytes] = []
    for path in paths:
        if path.exists():
            lines += path.read_bytes().rpartition(b"\n")[0].splitlines()
    return [_DECODER.decode(line) for line in lines]


def requests_in(traces: Iterable[TraceLine]) -> list[RequestTrace]:
    """The router's traces, oldest first."""
    return sorted((trace for trace in traces if isinstance(trace, RequestTrace)), key=lambda it: it.received_at)


def pushes_in(traces: Iterable[TraceLine], transfer_id: str) -> list[PushTrace]:
    """The pushes of prefill ranks for this transfer, failed attempts included."""
    return [trace for trace in traces if isinstance(trace, PushTrace) and trace.transfer_id == transfer_id]


def build_report(request: RequestTrace, pushes: Sequence[PushTrace]) -> TransferReport | None:
    """The report over all prefill ranks; None: no push has ended well."""
    done = [push for push in pushes if push.outcome == "done"]
    if not done:
        return None
    return TransferReport(
        prompt_tokens=done[0].prompt_tokens,
        cached_tokens=request.cached_tokens or 0,
        num_layers=max(push.num_layers for push in done),
        num_bytes=sum(push.num_bytes for push in done),
        ranges=sum(push.ranges for push in done),
        writes=sum(push.writes for push in done),
        ttft_s=_between(request.received_at, request.first_byte_at),
        prefill_s=_between(request.prefill_sent_at, request.prefill_replied_at),
        hidden_share=hidden_share(done),
    )


def hidden_share(pushes: Sequence[PushTrace]) -> float | None:
    """Bytes acknowledged by ``forward_end`` of their push, divided by all bytes; None: no byte was pushed.

    Example: two layers of 10 bytes, acknowledged at 1.0 and 3.0, forward pass ended at 2.0 → 0.5.
    """
    total = sum(layer.num_bytes for push in pushes for layer in push.layers)
    hidden = sum(layer.num_bytes for push in pushes for layer in push.layers if _is_hidden(layer, push))
    return hidden / total if total else None


def format_report(report: TransferReport, proved: str) -> str:
    """The report as a small table for a terminal. ``proved``: its first row, the result of the proof."""
    rows = [
        ("proven", proved),
        ("prompt", f"{report.prompt_tokens:,} tokens ({report.cached_tokens:,} cached on decode)"),
        ("layers per rank", f"{report.num_layers}"),
        ("KV pushed", _format_bytes(report.num_bytes)),
        ("writes", f"{report.writes:,} (coalesced from {report.ranges:,} block ranges)"),
        ("time to first token", _format_ms(report.ttft_s)),
        ("prefill", _format_ms(report.prefill_s)),
        ("hand-over", f"{_format_ms(report.hand_over_s)} (time to first token less prefill)"),
        ("hidden behind compute", _format_share(report.hidden_share)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["Transfer report", *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _is_hidden(layer: LayerTrace, push: PushTrace) -> bool:
    return push.forward_end is not None and layer.acked_at <= push.forward_end


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def _format_ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1000:,.1f} ms"


def _format_share(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.0%} of the bytes were acknowledged before the forward pass ended"


def _format_bytes(count: int) -> str:
    if count < 1 << 20:
        return f"{count / (1 << 10):,.1f} KiB"
    return f"{count / (1 << 20):,.1f} MiB"
