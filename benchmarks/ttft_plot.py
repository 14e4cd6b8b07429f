"""Draws the rows of ``ttft.py``: above time to first token, below the hand-over, one column for each link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from benchmarks.ttft_figures import Row, Spread
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Pick = Callable[[Row], Spread]

_TTFT: dict[str, tuple[str, Pick]] = {
    "single engine (prefill alone)": ("tab:gray", lambda row: row.prefill),
    "serial push": ("tab:orange", lambda row: row.serial.ttft),
    "layerwise push": ("tab:blue", lambda row: row.layerwise.ttft),
}
_HAND_OVER: dict[str, tuple[str, Pick]] = {
    "transfer alone (plain socket)": ("tab:gray", lambda row: row.transfer),
    "serial push": ("tab:orange", lambda row: row.serial.hand_over),
    "layerwise push": ("tab:blue", lambda row: row.layerwise.hand_over),
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """The plot is in ``path`` (PNG). Lines are medians, bands go from the least to the most."""
    links = list(dict.fromkeys(row.link for row in rows))
    mpl.use("Agg")
    figure = Figure(figsize=(4.6 * len(links), 7), layout="constrained")
    axes = figure.subplots(2, len(links), sharex=True, sharey="row", squeeze=False)
    for column, link in enumerate(links):
        of_link = [row for row in rows if row.link == link]
        above, below = axes[0][column], axes[1][column]
        above.set_title(link)
        _draw_lines(above, of_link, _TTFT)
        _draw_lines(below, of_link, _HAND_OVER)
        below.set_xlabel("prompt tokens")
    axes[0][0].set_ylabel("time to first token, ms")
    axes[1][0].set_ylabel("hand-over (TTFT less prefill's response), ms")
    axes[0][0].legend()
    axes[1][0].legend()
    figure.savefig(path, dpi=110)


def _draw_lines(axes: Axes, rows: Sequence[Row], lines: dict[str, tuple[str, Pick]]) -> None:
    tokens = [row.tokens for row in rows]
    for label, (colour, pick) in lines.items():
        figures = [pick(row) for row in rows]
        low, high = [s.low * 1000 for s in figures], [s.high * 1000 for s in figures]
        axes.plot(tokens, [s.median * 1000 for s in figures], marker="o", markersize=4, color=colour, label=label)
        axes.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.grid(visible=True, alpha=0.3)
