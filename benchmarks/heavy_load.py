"""Long prompts, more at once than the pool has room for: time to first token, layerwise beside serial.

    .venv/bin/python -m benchmarks.heavy_load --write    about 15 minutes; docs/heavy-load.md
    .venv/bin/python -m benchmarks.heavy_load --quick    short prompts, one run

Clients ask again as soon as they are answered, until a run's requests are through; decode has room for two of these
prompts, so the others wait. Runs of both ways alternate. Milliseconds; with fewer than 100 requests in a run the 99th
percentile is its slowest request. The gain compares runs of the same number: median (least..most).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.client import BenchmarkError
from benchmarks.figures import Spread, format_minutes, format_table, ms, percentile, ratios, spread, times, write_page
from benchmarks.link import LinkError
from benchmarks.places import LINKS, open_places
from benchmarks.ttft_figures import OURS, Burst, Way
from benchmarks.ttft_plan import prefill_s
from benchmarks.ttft_pool import Pool, start_pool

from pdcluster_cli.waiting import EngineDied

COLUMNS: Final = ("link", "tokens", "at once", "TTFT", "serial", "layerwise", "layerwise / serial")
_FAILURES: Final = (LinkError, BenchmarkError, EngineDied, TimeoutError, OSError)
_START_S: Final = 60.0

Run = dict[Way, Burst]


@dataclass(frozen=True, slots=True)
class Plan:
    """``link``: a key of ``LINKS``; each run has ``count`` requests, ``at_once`` at any time."""

    link: str
    tokens: int
    count: int
    at_once: int
    runs: int

    @property
    def seconds(self) -> float:
        """An estimate: prefill is the longer part."""
        return _START_S + len(OURS) * (self.runs * self.count + 2) * prefill_s(self.tokens) * 1.1


def main(plan: Plan, *, write: bool) -> int:
    """Measure, print, write. Returns the process's exit status."""
    print(f"takes {format_minutes(plan.seconds)}", flush=True)
    try:
        runs = _measure(plan)
    except _FAILURES as error:
        print(f"heavy_load: {error}", file=sys.stderr)
        return 1
    table = format_table(COLUMNS, build_cells((LINKS[plan.link], f"{plan.tokens:,}", str(plan.at_once)), runs))
    print(f"\n{table}")
    if write:
        words = (__doc__ or "").rpartition("\n\n")[2].replace("``", "`")
        counts = f"{plan.runs} runs of {plan.count} requests for each way."
        write_page("heavy_load", "Time to first token under heavy load", f"{words}{counts}\n\n{table}")
    return 0


def build_cells(case: tuple[str, ...], runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A line for the mean and one for the 99th percentile over each run's requests."""
    lines = []
    for name, pick in (("mean", statistics.fmean), ("p99", lambda values: percentile(values, 0.99))):
        figures = {way: [pick([answer.ttft_s for answer in run[way].answers]) for run in runs] for way in OURS}
        gain: Spread = ratios(figures[Way.LAYERWISE], figures[Way.SERIAL])
        lines.append((*case, name, *(ms(spread(figures[way])) for way in OURS), times(gain)))
    return lines


def _measure(plan: Plan) -> list[Run]:
    with (
        tempfile.TemporaryDirectory(prefix="pdcluster-load-") as folder,
        open_places(plan.link) as places,
        start_pool(places, Path(folder), OURS) as pool,
    ):
        for way in OURS:
            pool.ask(way, plan.tokens, count=2)
        return [_run(pool, plan, number) for number in range(plan.runs)]


def _run(pool: Pool, plan: Plan, number: int) -> Run:
    in_turn = OURS if number % 2 else OURS[::-1]
    taken = {way: pool.ask(way, plan.tokens, plan.count, plan.at_once) for way in in_turn}
    means = ", ".join(f"{way.value} {taken[way].ttft_s * 1000:,.0f} ms" for way in OURS)
    print(f"run {number + 1}: mean TTFT {means}", flush=True)
    return taken


def _parse(argv: Sequence[str]) -> tuple[Plan, bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", choices=list(LINKS), default="1gbit")
    parser.add_argument("--tokens", type=int, default=3500, help="8,000 at most")
    parser.add_argument("--requests", type=int, default=24, help="in each run")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write docs/heavy-load.md")
    parser.add_argument("--quick", action="store_true", help="loopback, 512 tokens, one run, no file")
    given = parser.parse_args(argv)
    if given.quick:
        return Plan("loopback", 512, 6, 3, 1), False
    return Plan(given.link, given.tokens, given.requests, given.at_once, given.runs), given.write


if __name__ == "__main__":
    chosen, is_written = _parse(sys.argv[1:])
    sys.exit(main(chosen, write=is_written))
