"""Draws the figures of ``router_peers.py``: a bar for each router, a plot for each figure and flow."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import matplotlib as mpl
from benchmarks.router_contenders import OURS, Contender, Flow
from benchmarks.router_gates import Figures
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_PLOTS: Final[dict[str, Callable[[Figures], list[float]]]] = {
    "CPU of a request, us": lambda figures: figures.small_us,
    "CPU of 100,000 tokens, us": lambda figures: figures.large_us,
    "CPU of an event, us": lambda figures: figures.chunk_us,
    "MB with 1,000 streams": lambda figures: figures.held_mb,
    "added p50, us": lambda figures: figures.added_p50_us,
    "added p99, us": lambda figures: figures.added_p99_us,
}


def draw(found: Mapping[Contender, Figures], path: Path) -> None:
    """The plot is in ``path`` (PNG). Bars are medians, lines go from the least to the most. Less is better in all."""
    mpl.use("Agg")
    figure = Figure(figsize=(3.1 * len(_PLOTS), 5), layout="constrained")
    axes = figure.subplots(len(Flow), len(_PLOTS), squeeze=False)
    for row, flow in zip(axes, Flow, strict=True):
        of_flow = {one.name: figures for one, figures in found.items() if one.flow is flow}
        for one, (title, pick) in zip(row, _PLOTS.items(), strict=True):
            _draw_bars(one, {name: pick(figures) for name, figures in of_flow.items()})
            one.set_title(f"{flow.value}: {title}", fontsize=9)
    figure.savefig(path, dpi=100)


def _draw_bars(axes: Axes, values: Mapping[str, list[float]]) -> None:
    medians = [statistics.median(one) for one in values.values()]
    below = [middle - min(one) for middle, one in zip(medians, values.values(), strict=True)]
    above = [max(one) - middle for middle, one in zip(medians, values.values(), strict=True)]
    colours = ["tab:blue" if name == OURS else "tab:gray" for name in values]
    axes.barh(list(values), medians, xerr=[below, above], color=colours)
    axes.invert_yaxis()
