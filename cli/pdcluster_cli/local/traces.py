"""Reads the trace lines that router and connector write (``pdcluster_protocol/trace.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from pdcluster_protocol.trace import PushTrace, RequestTrace, TraceLine

_DECODER: Final[msgspec.json.Decoder[TraceLine]] = msgspec.json.Decoder(TraceLine)


def read_traces(paths: Iterable[Path]) -> list[TraceLine]:
    """All whole lines of all files that exist; the last line may still be written and is then left out."""
    lines: list[bytes] = []
    for path in paths:
        if path.exists():
            lines += path.read_bytes().rpartition(b"\n")[0].splitlines()
    return [_DECODER.decode(line) for line in lines]


def requests_in(traces: Iterable[TraceLine]) -> list[RequestTrace]:
    """The router's lines, oldest first."""
    return sorted((trace for trace in traces if isinstance(trace, RequestTrace)), key=lambda it: it.received_at)


def pushes_in(traces: Iterable[TraceLine], transfer_id: str) -> list[PushTrace]:
    """What prefill ranks pushed for this transfer, failed attempts included."""
    return [trace for trace in traces if isinstance(trace, PushTrace) and trace.transfer_id == transfer_id]
