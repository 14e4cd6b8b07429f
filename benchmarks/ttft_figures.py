"""Figures from the samples of ``ttft.py``: spreads, rows and tables. Pure.

received                              forward ends      last byte acknowledged   first token
   |--------------- prefill ---------------|-- rest of the push --|-- decode --|
   |------------------------------- last byte --------------------|
   |--------------------------------- TTFT ------------------------------------|

A burst is several requests at once. It cannot end before its *limit*, which is max(prefill alone, transfer alone).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from benchmarks.figures import Spread, format_table, ms, percent, ratios, spread, times

from pdcluster_cli.local.report import TransferReport, build_report
from pdcluster_protocol.trace import PushTrace, RequestTrace


class Way(Enum):
    """How a request gets its first token."""

    SINGLE = "single engine"
    SERIAL = "serial push"
    LAYERWISE = "layerwise push"
    MOONCAKE = "MooncakeConnector"
    NIXL = "NixlConnector"


OURS: Final = (Way.SERIAL, Way.LAYERWISE)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it, in seconds from its first byte out. ``prefill_s``: prefill's own response
    time; None if the time is in a trace."""

    ttft_s: float
    prefill_s: float | None


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request through our pool, from its traces. Monotonic seconds."""

    report: TransferReport
    received_at: float
    last_acked_at: float

    @property
    def last_byte_s(self) -> float:
        """Time from the router's receipt to the last acknowledged byte."""
        return self.last_acked_at - self.received_at


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests of one way, made at once. ``transfers``: one for each request through our pool, in any order."""

    answers: tuple[Answer, ...]
    transfers: tuple[Transfer, ...] = ()

    @property
    def ttft_s(self) -> float:
        """The mean time to first token over the requests."""
        return statistics.mean(answer.ttft_s for answer in self.answers)

    @property
    def last_ttft_s(self) -> float:
        return max(answer.ttft_s for answer in self.answers)

    @property
    def hand_over_s(self) -> float:
        """Mean TTFT less prefill's mean response time: the time that two engines cost beyond one."""
        return self.ttft_s - statistics.mean(self._prefill_times)

    @property
    def last_byte_s(self) -> float:
        """Time from the first request's receipt to the last acknowledged byte of all requests."""
        first = min(transfer.received_at for transfer in self.transfers)
        return max(transfer.last_acked_at for transfer in self.transfers) - first

    @property
    def hidden_share(self) -> float:
        """The mean share of bytes that were acknowledged before their forward pass ended."""
        return statistics.mean(transfer.report.hidden_share or 0.0 for transfer in self.transfers)

    @property
    def num_bytes(self) -> int:
        return sum(transfer.report.num_bytes for transfer in self.transfers)

    @property
    def _prefill_times(self) -> list[float]:
        told = [transfer.report.prefill_s for transfer in self.transfers]
        seen = [answer.prefill_s for answer in self.answers]
        return [seconds for seconds in (*told, *seen) if seconds is not None]


@dataclass(frozen=True, slots=True)
class Round:
    """All ways once, one after the other. ``bandwidth``: bytes/s of a plain socket over the same link, just before."""

    bandwidth: float
    bursts: Mapping[Way, Burst]

    @property
    def prefill_s(self) -> float:
        """Prefill alone: a single engine's last first token."""
        return self.bursts[Way.SINGLE].last_ttft_s

    @property
    def transfer_s(self) -> float:
        """Transfer alone: all KV over the plain socket."""
        return self.bursts[Way.LAYERWISE].num_bytes / self.bandwidth

    @property
    def limit_s(self) -> float:
        return max(self.prefill_s, self.transfer_s)


@dataclass(frozen=True, slots=True)
class WayFigures:
    """Figures of one way, in seconds except ``hidden_share``; None if the way has no such figure."""

    ttft: Spread
    hand_over: Spread | None
    last_byte: Spread | None
    hidden_share: Spread | None


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt length and concurrency over one link. Each ratio compares figures of one round."""

    link: str
    tokens: int
    concurrency: int
    kv_bytes: int
    num_rounds: int
    prefill: Spread
    transfer: Spread
    ways: Mapping[Way, WayFigures]
    last_byte_to_limit: Spread
    ttft_to_limit: Spread
    """The burst's last TTFT over the limit."""
    exposed: Spread
    """Hand-over of the layerwise push over that of the serial push."""
    ttft_to: Mapping[Way, Spread]
    """TTFT of the layerwise push over that of this way."""


WAY_COLUMNS: Final = ("link", "tokens", "at once", "way", "TTFT", "hand-over", "last byte", "hidden")
LIMIT_COLUMNS: Final = (
    "link",
    "tokens",
    "at once",
    "rounds",
    "KV MB",
    "prefill alone",
    "transfer alone",
    "last byte / limit",
    "last TTFT / limit",
    "hand-over / serial's",
    *(f"TTFT / {way.value}" for way in Way if way is not Way.LAYERWISE),
)


def read_transfer(request: RequestTrace, pushes: Sequence[PushTrace]) -> Transfer | None:
    """The transfer of one request; None when its trace is not whole or it did not succeed."""
    report = build_report(request, pushes)
    if report is None or report.prefill_s is None:
        return None
    return Transfer(report, request.received_at, max(layer.acked_at for push in pushes for layer in push.layers))


def build_row(link: str, tokens: int, rounds: Sequence[Round]) -> Row:
    """The figures of one case. At least one round, all with single engine and our pushes; a peer may have failed."""
    layerwise = [taken.bursts[Way.LAYERWISE] for taken in rounds]
    ways = [way for way in Way if any(way in taken.bursts for taken in rounds)]
    limits = [taken.limit_s for taken in rounds]
    return Row(
        link=link,
        tokens=tokens,
        concurrency=len(layerwise[0].answers),
        kv_bytes=layerwise[0].num_bytes,
        num_rounds=len(rounds),
        prefill=spread(taken.prefill_s for taken in rounds),
        transfer=spread(taken.transfer_s for taken in rounds),
        ways={way: _way_figures(way, [it.bursts[way] for it in rounds if way in it.bursts]) for way in ways},
        last_byte_to_limit=ratios([burst.last_byte_s for burst in layerwise], limits),
        ttft_to_limit=ratios([burst.last_ttft_s for burst in layerwise], limits),
        exposed=_ratios_to(Way.SERIAL, rounds, lambda burst: burst.hand_over_s),
        ttft_to={way: _ratios_to(way, rounds, lambda burst: burst.ttft_s) for way in ways if way != Way.LAYERWISE},
    )


def format_ways(rows: Sequence[Row]) -> str:
    """A Markdown table with a line for each way, milliseconds: median (least..most)."""
    return format_table(WAY_COLUMNS, [_way_cells(row, way) for row in rows for way in row.ways])


def format_limits(rows: Sequence[Row]) -> str:
    """A Markdown table of the layerwise push beside its limit and the other ways."""
    return format_table(LIMIT_COLUMNS, map(_limit_cells, rows))


def _ratios_to(way: Way, rounds: Sequence[Round], pick: Callable[[Burst], float]) -> Spread:
    """The layerwise figure over that of ``way``, in the rounds that have both."""
    both = [taken.bursts for taken in rounds if way in taken.bursts]
    return ratios([pick(bursts[Way.LAYERWISE]) for bursts in both], [pick(bursts[way]) for bursts in both])


def _way_figures(way: Way, bursts: Sequence[Burst]) -> WayFigures:
    is_ours = way in OURS
    return WayFigures(
        ttft=spread(burst.ttft_s for burst in bursts),
        hand_over=None if way is Way.SINGLE else spread(burst.hand_over_s for burst in bursts),
        last_byte=spread(burst.last_byte_s for burst in bursts) if is_ours else None,
        hidden_share=spread(burst.hidden_share for burst in bursts) if is_ours else None,
    )


def _case_cells(row: Row) -> tuple[str, str, str]:
    return row.link, f"{row.tokens:,}", str(row.concurrency)


def _way_cells(row: Row, way: Way) -> tuple[str, ...]:
    figures = row.ways[way]
    timed = [ms(it) if it else "" for it in (figures.ttft, figures.hand_over, figures.last_byte)]
    return (*_case_cells(row), way.value, *timed, percent(figures.hidden_share) if figures.hidden_share else "")


def _limit_cells(row: Row) -> tuple[str, ...]:
    others = [row.ttft_to.get(way) for way in Way if way is not Way.LAYERWISE]
    return (
        *_case_cells(row),
        str(row.num_rounds),
        f"{row.kv_bytes / 1e6:,.0f}",
        ms(row.prefill),
        ms(row.transfer),
        *map(times, (row.last_byte_to_limit, row.ttft_to_limit, row.exposed)),
        *(times(ratio) if ratio else "" for ratio in others),
    )
