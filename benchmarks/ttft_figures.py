"""What the samples of ``ttft.py`` say: spreads, rows and the table. Pure.

received                              forward ends      last byte acknowledged   first token
   |--------------- prefill ---------------|-- rest of the push --|-- decode --|
   |------------------------------- last byte --------------------|
   |--------------------------------- TTFT ------------------------------------|
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pdcluster_cli.local.report import Report, build_report
from pdcluster_cli.local.traces import PushTrace, RequestTrace


class Way(Enum):
    """How a request gets its first token."""

    SINGLE = "single engine"
    SERIAL = "serial push"
    LAYERWISE = "layerwise push"


@dataclass(frozen=True, slots=True)
class Transfer:
    """What the traces say about one request through a pool. Seconds; ``last_byte_s`` from the router's receipt on."""

    report: Report
    last_byte_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. ``ttft_s``: from the client's first byte out to the first body byte in; ``transfer`` with a pool."""

    way: Way
    ttft_s: float
    transfer: Transfer | None

    @property
    def hand_over_s(self) -> float:
        """TTFT less prefill's own response time: what two engines cost beyond one."""
        assert self.transfer is not None
        assert self.transfer.report.prefill_s is not None
        return self.ttft_s - self.transfer.report.prefill_s


@dataclass(frozen=True, slots=True)
class Round:
    """All ways once, one after the other. ``bandwidth``: bytes/s of a plain socket over the same link, just before."""

    bandwidth: float
    samples: dict[Way, Sample]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class WayFigures:
    """One way of pushing. Seconds, but for the share in [0, 1]."""

    last_byte: Spread
    ttft: Spread
    hand_over: Spread
    hidden_share: Spread


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt length over one link. ``gain``: TTFT of layerwise over serial, of the same round each."""

    link: str
    tokens: int
    kv_bytes: int
    prefill: Spread
    transfer: Spread
    serial: WayFigures
    layerwise: WayFigures
    gain: Spread


COLUMNS: Final = (
    "link",
    "tokens",
    "KV MB",
    "prefill alone = single engine",
    "transfer alone",
    "serial: last byte",
    "serial: TTFT",
    "serial: hand-over",
    "layerwise: last byte",
    "layerwise: TTFT",
    "layerwise: hand-over",
    "layerwise: hidden",
    "TTFT layerwise / serial",
)


def read_transfer(request: RequestTrace, pushes: Sequence[PushTrace]) -> Transfer | None:
    """The transfer of one request; None when its trace is not whole or it did not succeed.

    Example: received at 10.0, layers acknowledged at 10.2 and 10.5 → last byte after 0.5 s.
    """
    report = build_report(request, pushes)
    if report is None or report.prefill_s is None:
        return None
    acked = max(layer.acked_at for push in pushes for layer in push.layers)
    return Transfer(report, acked - request.received_at)


def spread(values: Iterable[float]) -> Spread:
    """Median and range. Example: 3, 1, 2 → 2 (1..3)."""
    taken = list(values)
    return Spread(statistics.median(taken), min(taken), max(taken))


def build_row(link: str, tokens: int, rounds: Sequence[Round]) -> Row:
    """The figures of one prompt length over one link. At least one round."""
    kv_bytes = _transfer_of(rounds[0].samples[Way.LAYERWISE]).report.num_bytes
    return Row(
        link=link,
        tokens=tokens,
        kv_bytes=kv_bytes,
        prefill=spread(taken.samples[Way.SINGLE].ttft_s for taken in rounds),
        transfer=spread(kv_bytes / taken.bandwidth for taken in rounds),
        serial=_way_figures([taken.samples[Way.SERIAL] for taken in rounds]),
        layerwise=_way_figures([taken.samples[Way.LAYERWISE] for taken in rounds]),
        gain=spread(taken.samples[Way.LAYERWISE].ttft_s / taken.samples[Way.SERIAL].ttft_s for taken in rounds),
    )


def format_table(rows: Sequence[Row]) -> str:
    """A Markdown table, milliseconds: median (least..most)."""
    lines = [" | ".join(COLUMNS), "|".join("---" for _ in COLUMNS)]
    lines += [" | ".join(_cells(row)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _way_figures(samples: Sequence[Sample]) -> WayFigures:
    return WayFigures(
        last_byte=spread(_transfer_of(sample).last_byte_s for sample in samples),
        ttft=spread(sample.ttft_s for sample in samples),
        hand_over=spread(sample.hand_over_s for sample in samples),
        hidden_share=spread(_transfer_of(sample).report.hidden_share or 0.0 for sample in samples),
    )


def _transfer_of(sample: Sample) -> Transfer:
    assert sample.transfer is not None
    return sample.transfer


def _cells(row: Row) -> tuple[str, ...]:
    serial, layerwise, share = row.serial, row.layerwise, row.layerwise.hidden_share
    return (
        row.link,
        f"{row.tokens:,}",
        f"{row.kv_bytes / 1e6:,.0f}",
        *map(_ms, (row.prefill, row.transfer)),
        *map(_ms, (serial.last_byte, serial.ttft, serial.hand_over)),
        *map(_ms, (layerwise.last_byte, layerwise.ttft, layerwise.hand_over)),
        f"{share.median:.0%} ({share.low:.0%}..{share.high:.0%})",
        f"{row.gain.median:.2f} ({row.gain.low:.2f}..{row.gain.high:.2f})",
    )


def _ms(figure: Spread) -> str:
    return f"{figure.median * 1000:,.0f} ({figure.low * 1000:,.0f}..{figure.high * 1000:,.0f})"
