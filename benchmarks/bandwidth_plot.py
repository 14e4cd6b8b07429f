"""Draws the rows of ``push_bandwidth.py``: bandwidth of each way as a share of the best reference's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from benchmarks.bandwidth_figures import BandwidthRow
from benchmarks.references import Way
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GOAL: Final = 0.9
_COLOURS: Final = {
    Way.CONNECTOR: "tab:blue",
    Way.POLL: "tab:green",
    Way.BLOCKING: "tab:orange",
    Way.SOCKET: "tab:gray",
}


def draw(rows: Sequence[BandwidthRow], path: Path) -> None:
    """The plot is in ``path`` (PNG): one field for each link, bars are medians, whiskers go from least to most."""
    links = list(dict.fromkeys(row.link for row in rows))
    mpl.use("Agg")
    figure = Figure(figsize=(9, 2.6 * len(links)), layout="constrained")
    fields = figure.subplots(len(links), 1, sharex=True, squeeze=False)
    for number, link in enumerate(links):
        _draw_link(fields[number][0], link, [row for row in rows if row.link == link])
    fields[0][0].legend(ncols=4, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.1))
    figure.savefig(path, dpi=110)


def _draw_link(axes: Axes, link: str, rows: Sequence[BandwidthRow]) -> None:
    cases = list(dict.fromkeys(_case(row) for row in rows))
    for number, (way, colour) in enumerate(_COLOURS.items()):
        of_way = [row for row in rows if row.way is way]
        places = [cases.index(_case(row)) + 0.2 * (number - 1.5) for row in of_way]
        medians = [row.to_best.median for row in of_way]
        below = [row.to_best.median - row.to_best.low for row in of_way]
        above = [row.to_best.high - row.to_best.median for row in of_way]
        axes.bar(places, medians, 0.2, yerr=[below, above], color=colour, label=way.value, error_kw={"linewidth": 0.8})
    axes.axhline(GOAL, color="black", linewidth=0.8, linestyle=":")
    axes.set_title(link)
    axes.set_ylabel("to the best")
    axes.set_xticks(range(len(cases)), cases, fontsize="small")


def _case(row: BandwidthRow) -> str:
    return f"TP {row.tp}\nblocks of {row.block_size}\n{row.placement.value}"
