"""Compares time to first token of a layerwise push, a serial push, a single engine and upstream's connectors.

    .venv/bin/python -m benchmarks.ttft --write    all of it, one and a half hours; docs/ttft.{md,png}
    .venv/bin/python -m benchmarks.ttft --quick    one link, two lengths, one round: does everything still run

    ... --concurrency 1 --ways single serial layerwise     our own figures alone, 20 minutes
    ... --layers 32                                        the same KV per token in twice as many layers; no page

Needs root (network namespaces, see ``link.py``) but for ``--links loopback``, and ``requirements/peers.lock`` for NIXL.
In every round all ways run once, one after the other, in rotating order, and a plain socket measures the link. So
ratios hold on a noisy machine. A case has as many rounds as fit into ``--case-s``; a case without any is left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.client import BenchmarkError
from benchmarks.figures import DOCS, format_minutes, write_page
from benchmarks.link import LinkError
from benchmarks.places import LINKS, Places, measure_bandwidth, open_places, share_places
from benchmarks.starter import DEEP_KV, WIDE_KV
from benchmarks.ttft_figures import Burst, Round, Row, Way, build_row, format_limits, format_ways
from benchmarks.ttft_plan import Case, Plan
from benchmarks.ttft_plot import draw
from benchmarks.ttft_pool import Pool, start_pool

from pdcluster_cli.processes.waiting import EngineDied

TOKENS: Final = (256, 512, 2048, 8000)
CONCURRENCY: Final = (1, 4, 16)
_PROBE_BYTES: Final = 32 << 20
_WARM_UPS: Final = 2
"""Requests with the longest prompt, which together touch every page of the KV caches once."""
_NEEDED: Final = (Way.SINGLE, Way.SERIAL, Way.LAYERWISE)
SERVED: Final = {served.model.num_layers: served for served in (WIDE_KV, DEEP_KV)}
_FAILURES: Final = (LinkError, BenchmarkError, EngineDied, TimeoutError, OSError)

NOTE: Final = """
A 16-layer model with 64 KiB of KV per token (bf16), one compute thread for each engine, interleaved rounds.
Milliseconds: median (least..most). The single engine's time to first token is prefill alone. Transfer alone is the KV's
size over what one plain socket moved over the same link in the same round; the *limit* is the greater of both, of all
requests at once. Last byte: from the router's receipt to the last acknowledged one. Hand-over: time to first token less
prefill's own response time; negative when the first token came before prefill's reply. Hidden: share of the bytes that
were acknowledged before the forward pass ended. With several requests at once TTFT and hand-over are means. The peers
have no router in their way: the client plays their proxy. A round in which a peer failed is not in its figures."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A pool and the places it lives in."""

    pool: Pool
    places: Places


def main(plan: Plan, *, write: bool) -> int:
    """Measure, print, write. Returns the process's exit status."""
    print(
        f"takes {format_minutes(plan.seconds)}; left out: {', '.join(map(str, plan.skipped)) or 'nothing'}", flush=True
    )
    try:
        rows = [row for links in share_places(plan.links) for row in _measure_links(links, plan)]
    except _FAILURES as error:
        print(f"ttft: {error}", file=sys.stderr)
        return 1
    print(f"\n{format_limits(rows)}\n\n{format_ways(rows)}")
    if write:
        _write(plan, rows)
    return 0


def _measure_links(links: Sequence[str], plan: Plan) -> Iterator[Row]:
    with _open_bench(links[0], plan) as bench:
        for _ in range(_WARM_UPS):
            for way in plan.ways:
                _ask(bench.pool, way, Case(links[0], plan.max_tokens, 1))
        for case in plan.cases_of(links):
            bench.places.set_rate(case.link)
            rounds = [_run_round(bench, plan.ways, case, number) for number in range(plan.rounds_of(case))]
            row = build_row(LINKS[case.link], case.tokens, rounds)
            print(format_limits([row]).splitlines()[-1], flush=True)
            yield row


def _run_round(bench: Bench, ways: Sequence[Way], case: Case, number: int) -> Round:
    turn = number % len(ways)
    bandwidth = measure_bandwidth(bench.places.path, _PROBE_BYTES)
    in_turn = (*ways[turn:], *ways[:turn])
    bursts = {way: _ask(bench.pool, way, case) for way in in_turn}
    return Round(bandwidth, {way: burst for way, burst in bursts.items() if burst})


def _ask(pool: Pool, way: Way, case: Case) -> Burst | None:
    """Measures one burst. None when a peer failed, which is printed.

    Raises:
        BenchmarkError: A way of ours failed.
    """
    try:
        return pool.ask(way, case.tokens, case.concurrency, case.concurrency)
    except BenchmarkError as error:
        if way in _NEEDED:
            raise
        print(f"{way.value} failed, {case}: {error}", file=sys.stderr, flush=True)
        return None


@contextmanager
def _open_bench(link: str, plan: Plan) -> Iterator[Bench]:
    with (
        tempfile.TemporaryDirectory(prefix="pdcluster-ttft-") as folder,
        open_places(link) as places,
        start_pool(places, Path(folder), plan.ways, SERVED[plan.layers]) as pool,
    ):
        yield Bench(pool, places)


def _write(plan: Plan, rows: Sequence[Row]) -> None:
    draw(rows, DOCS / "ttft.png")
    skipped = f"Left out for their length: {', '.join(map(str, plan.skipped))}.\n" if plan.skipped else ""
    plot = "![Time to first token and hand-over over prompt length](ttft.png)"
    tables = f"## Beside the limit and the others\n\n{format_limits(rows)}\n\n## Each way\n\n{format_ways(rows)}"
    write_page("ttft", "Time to first token", f"{NOTE}\n\n{skipped}\n{tables}\n\n{plot}")


def _parse(argv: Sequence[str]) -> tuple[Plan, bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [way.name.lower() for way in Way]
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="prompt lengths, 8,000 at most")
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(CONCURRENCY), help="requests at once")
    parser.add_argument("--ways", nargs="+", choices=names, default=names, help="the first three always run")
    parser.add_argument("--layers", type=int, choices=list(SERVED), default=16, help="of the model")
    parser.add_argument("--rounds", type=int, default=5, help="at most, for each case")
    parser.add_argument("--case-s", type=float, default=450, help="seconds for each case at most")
    parser.add_argument("--write", action="store_true", help="write docs/ttft.{md,png}")
    parser.add_argument("--quick", action="store_true", help="1 Gbit/s, 256 and 512 tokens, one round, no files")
    given = parser.parse_args(argv)
    if given.write and given.layers != 16:
        parser.error("the page is about 16 layers: leave out --write")
    ways = tuple(way for way in Way if way in _NEEDED or way.name.lower() in given.ways)
    if given.quick:
        return Plan(("1gbit",), (256, 512), (1, 4), ways, 1, given.case_s, given.layers), False
    cases = tuple(given.links), tuple(given.tokens), tuple(given.concurrency)
    return Plan(*cases, ways, given.rounds, given.case_s, given.layers), given.write


if __name__ == "__main__":
    chosen, is_written = _parse(sys.argv[1:])
    sys.exit(main(chosen, write=is_written))
