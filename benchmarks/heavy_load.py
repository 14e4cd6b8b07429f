"""Sends more prompts at once than the pool has room for: time to first token of a layerwise push and of other ways.

    .venv/bin/python -m benchmarks.heavy_load --write    about half an hour; docs/heavy-load.md
    .venv/bin/python -m benchmarks.heavy_load --quick    short prompts, one run, no file

Clients ask again as soon as they are answered, until a run's requests are through. Each engine has room for two of the
longest prompts, so the others wait. The serial push sends all KV after prefill; the single engine does both roles, and
sends none. Runs of all ways alternate. The model has 16 layers and 32 KiB of KV per token. Milliseconds; with fewer
than 100 requests in a run the 99th percentile is its slowest request. Ratios compare runs of the same number: median
(least..most).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.client import BenchmarkError
from benchmarks.figures import format_minutes, format_table, ms, percentile, ratios, spread, times, write_page
from benchmarks.link import LinkError
from benchmarks.places import LINKS, open_places, share_places
from benchmarks.starter import Served, wide_kv
from benchmarks.ttft_figures import OURS, Burst, Way
from benchmarks.ttft_plan import prefill_s
from benchmarks.ttft_pool import Pool, start_pool

from pdcluster_cli.processes.waiting import EngineDied

WAYS: Final = (Way.SINGLE, *OURS)
_BESIDE: Final = (Way.SERIAL, Way.SINGLE)
"""The ways with which a layerwise push is compared."""
COLUMNS: Final = (
    *("link", "tokens", "at once", "TTFT"),
    *(way.value for way in WAYS),
    *(f"layerwise / {way.value}" for way in _BESIDE),
)
MODEL: Final = wide_kv(num_layers=16, kv_heads=4)
"""Half as wide as the model of ``ttft.py``: half the KV and half the compute, so their ratio is the same."""
_ROOM_PROMPTS: Final = 2
_ANSWERS_ROOM: Final = 512
_COMPUTE_SHARE: Final = 0.5
"""The compute of ``MODEL``, as a share of that of ``ttft.py``'s model."""
_FAILURES: Final = (LinkError, BenchmarkError, EngineDied, TimeoutError, OSError)
_START_S: Final = 40.0

Run = dict[Way, Burst]


@dataclass(frozen=True, slots=True)
class Plan:
    """``links``: keys of ``LINKS``; each run has ``count`` requests, ``at_once`` at any time."""

    links: tuple[str, ...]
    tokens: tuple[int, ...]
    count: int
    at_once: int
    runs: int

    @property
    def served(self) -> Served:
        """The model of the engines, and their room for KV."""
        return Served(MODEL, _ROOM_PROMPTS * max(self.tokens) + _ANSWERS_ROOM)

    @property
    def seconds(self) -> float:
        """An estimate of the whole run: prefill is most of it."""
        one_of_each = sum(prefill_s(tokens) for tokens in self.tokens) * _COMPUTE_SHARE * 1.2
        return _START_S + len(self.links) * len(WAYS) * self.runs * self.count * one_of_each


def main(plan: Plan, *, write: bool, flags: str) -> int:
    """Measure, print, write. Returns the process's exit status."""
    print(f"takes {format_minutes(plan.seconds)}", flush=True)
    try:
        cells = [line for links in share_places(plan.links) for line in _measure_links(links, plan)]
    except _FAILURES as error:
        print(f"heavy_load: {error}", file=sys.stderr)
        return 1
    table = format_table(COLUMNS, cells)
    print(f"\n{table}")
    if write:
        words = (__doc__ or "").rpartition("\n\n")[2].replace("``", "`")
        counts = f"{plan.runs} runs of {plan.count} requests for each way."
        write_page("heavy_load", "Time to first token under heavy load", f"{words}{counts}\n\n{table}", flags=flags)
    return 0


def build_cells(case: tuple[str, ...], runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A line for the mean and one for the 99th percentile over each run's requests."""
    lines = []
    for name, pick in (("mean", statistics.fmean), ("p99", lambda values: percentile(values, 0.99))):
        figures = {way: [pick([answer.ttft_s for answer in run[way].answers]) for run in runs] for way in WAYS}
        gains = [ratios(figures[Way.LAYERWISE], figures[way]) for way in _BESIDE]
        lines.append((*case, name, *(ms(spread(figures[way])) for way in WAYS), *map(times, gains)))
    return lines


def _measure_links(links: Sequence[str], plan: Plan) -> Iterator[tuple[str, ...]]:
    with (
        tempfile.TemporaryDirectory(prefix="pdcluster-load-") as folder,
        open_places(links[0]) as places,
        start_pool(places, Path(folder), WAYS, plan.served) as pool,
    ):
        for way in WAYS:
            pool.ask(way, max(plan.tokens), count=_ROOM_PROMPTS)
        for link in links:
            places.set_rate(link)
            for tokens in plan.tokens:
                case = (LINKS[link], f"{tokens:,}", str(plan.at_once))
                lines = build_cells(case, [_run(pool, plan, tokens, number) for number in range(plan.runs)])
                print(*format_table(COLUMNS, lines).splitlines()[2:], sep="\n", flush=True)
                yield from lines


def _run(pool: Pool, plan: Plan, tokens: int, number: int) -> Run:
    turn = number % len(WAYS)
    taken = {way: pool.ask(way, tokens, plan.count, plan.at_once) for way in (*WAYS[turn:], *WAYS[:turn])}
    means = ", ".join(f"{way.value} {taken[way].ttft_s * 1000:,.0f} ms" for way in WAYS)
    print(f"run {number + 1}: {tokens:,} tokens, mean TTFT {means}", flush=True)
    return taken


def _parse(argv: Sequence[str]) -> tuple[Plan, bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=["1gbit", "2gbit"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 2048], help="prompt lengths")
    parser.add_argument("--requests", type=int, default=100, help="in each run")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write docs/heavy-load.md")
    parser.add_argument("--quick", action="store_true", help="loopback, 512 tokens, one run, no file")
    given = parser.parse_args(argv)
    if given.quick:
        return Plan(("loopback",), (512,), 6, 3, 1), False
    return Plan(tuple(given.links), tuple(given.tokens), given.requests, given.at_once, given.runs), given.write


if __name__ == "__main__":
    chosen, is_written = _parse(sys.argv[1:])
    own_flags = " ".join(word for word in sys.argv[1:] if word != "--write")
    sys.exit(main(chosen, write=is_written, flags=own_flags))
