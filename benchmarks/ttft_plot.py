"""Draws the rows of ``ttft.py``: above time to first token, below the hand-over, one column for each link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from benchmarks.figures import Spread
from benchmarks.ttft_figures import Row, Way
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Pick = Callable[[Row], Spread | None]

_COLOURS: Final = {
    Way.SINGLE: "tab:gray",
    Way.SERIAL: "tab:orange",
    Way.LAYERWISE: "tab:blue",
    Way.MOONCAKE: "tab:green",
    Way.NIXL: "tab:red",
}
_TRANSFER_ALONE: Final = "transfer alone (plain socket)"


def draw(rows: Sequence[Row], path: Path) -> None:
    """The plot is in ``path`` (PNG). Lines are medians, bands go from the least to the most. It shows single
    requests, or all rows if there are no single requests."""
    rows = [row for row in rows if row.concurrency == 1] or rows
    links = list(dict.fromkeys(row.link for row in rows))
    mpl.use("Agg")
    figure = Figure(figsize=(4.6 * len(links), 7), layout="constrained")
    axes = figure.subplots(2, len(links), sharex=True, sharey="row", squeeze=False)
    for column, link in enumerate(links):
        of_link = [row for row in rows if row.link == link]
        above, below = axes[0][column], axes[1][column]
        above.set_title(link)
        _draw_lines(above, of_link, {way.value: (_COLOURS[way], _ttft_of(way)) for way in Way})
        _draw_lines(below, of_link, _hand_overs())
        below.set_xlabel("prompt tokens")
    axes[0][0].set_ylabel("time to first token, ms")
    axes[1][0].set_ylabel("hand-over (TTFT less prefill's response), ms")
    axes[0][0].legend()
    axes[1][0].legend()
    figure.savefig(path, dpi=110)


def _hand_overs() -> dict[str, tuple[str, Pick]]:
    transfer: dict[str, tuple[str, Pick]] = {_TRANSFER_ALONE: ("tab:gray", lambda row: row.transfer)}
    return transfer | {way.value: (_COLOURS[way], _hand_over_of(way)) for way in Way if way is not Way.SINGLE}


def _ttft_of(way: Way) -> Pick:
    return lambda row: row.ways[way].ttft if way in row.ways else None


def _hand_over_of(way: Way) -> Pick:
    return lambda row: row.ways[way].hand_over if way in row.ways else None


def _draw_lines(axes: Axes, rows: Sequence[Row], lines: Mapping[str, tuple[str, Pick]]) -> None:
    for label, (colour, pick) in lines.items():
        points = [(row.tokens, figure) for row in rows if (figure := pick(row)) is not None]
        if not points:
            continue
        tokens, figures = zip(*points, strict=True)
        low, high = [s.low * 1000 for s in figures], [s.high * 1000 for s in figures]
        axes.plot(tokens, [s.median * 1000 for s in figures], marker="o", markersize=4, color=colour, label=label)
        axes.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)
    lengths = sorted({row.tokens for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{count:,}" for count in lengths])
    axes.grid(visible=True, alpha=0.3)
