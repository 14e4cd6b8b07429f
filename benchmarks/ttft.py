"""What layerwise push is for: time to first token beside a serial push and a single engine, over real slow links.

    .venv/bin/python -m benchmarks.ttft            all of it, about 25 minutes; writes docs/ttft.{md,png}
    .venv/bin/python -m benchmarks.ttft --quick    one link, two lengths, one round: does everything still run

Needs root (network namespaces, see ``link.py``) but for ``--links loopback``. In every round all ways run once, one
after the other, in turning order, and a plain socket measures the link: so ratios hold on a noisy machine.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import raw_socket
from benchmarks.link import End, Link, LinkError, open_link
from benchmarks.ttft_figures import Round, Row, Way, build_row, format_table
from benchmarks.ttft_plot import draw
from benchmarks.ttft_pool import LOCAL, BenchmarkError, Place, Pool, place_at, start_pool

from pdcluster_cli.waiting import EngineDied

LINKS: Final = {"loopback": "loopback", "1gbit": "1 Gbit/s", "2gbit": "2 Gbit/s"}
TOKENS: Final = (256, 512, 1024, 2048, 4096, 8000)
DOCS: Final = Path(__file__).parents[1] / "docs"
_PROBE_BYTES: Final = 32 << 20
_WARM_UPS: Final = 2
"""Of the longest prompt: together they touch every page of the KV caches once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. ``links``: keys of ``LINKS``."""

    links: tuple[str, ...]
    tokens: tuple[int, ...]
    rounds: int
    out: Path | None


@dataclass(frozen=True, slots=True)
class Bench:
    """A pool and the way between its two places."""

    pool: Pool
    path: raw_socket.Path
    link: Link | None

    def set_link(self, name: str) -> None:
        if self.link is not None:
            self.link.set_rate(name)


def main(plan: Plan) -> int:
    """Measure, print, write. Returns the process's exit status."""
    try:
        rows = [row for links in _by_place(plan.links) for row in _measure_links(links, plan)]
    except (LinkError, BenchmarkError, EngineDied, TimeoutError) as error:
        print(f"ttft: {error}", file=sys.stderr)
        return 1
    table = format_table(rows)
    print(f"\n{table}")
    if plan.out is not None:
        _write(plan, table, rows, plan.out)
    return 0


def _by_place(links: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Links that can share their engines: those between namespaces differ in their rate only."""
    slow = tuple(link for link in links if link != "loopback")
    if "loopback" in links:
        yield ("loopback",)
    if slow:
        yield slow


def _measure_links(links: Sequence[str], plan: Plan) -> Iterator[Row]:
    with _open_bench(links[0]) as bench:
        for _ in range(_WARM_UPS):
            for way in Way:
                bench.pool.ask(way, max(plan.tokens))
        for link in links:
            bench.set_link(link)
            for tokens in plan.tokens:
                rounds = [_run_round(bench, tokens, number) for number in range(plan.rounds)]
                row = build_row(LINKS[link], tokens, rounds)
                print(format_table([row]).splitlines()[-1], flush=True)
                yield row


def _run_round(bench: Bench, tokens: int, number: int) -> Round:
    ways = list(Way)
    turn = number % len(ways)
    bandwidth = raw_socket.measure_bandwidth(bench.path, _PROBE_BYTES)
    return Round(bandwidth, {way: bench.pool.ask(way, tokens) for way in (*ways[turn:], *ways[:turn])})


@contextmanager
def _open_bench(link: str) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="pdcluster-ttft-") as folder:
        if link == "loopback":
            with start_pool(LOCAL, LOCAL, Path(folder)) as pool:
                yield Bench(pool, _path(LOCAL, LOCAL), None)
            return
        with open_link(link) as slow:
            far, near = place_at(slow, End.A), place_at(slow, End.B)
            with start_pool(far, near, Path(folder)) as pool:
                yield Bench(pool, _path(far, near), slow)


def _path(prefill: Place, decode: Place) -> raw_socket.Path:
    return raw_socket.Path(decode.host, prefill.inside, decode.inside)


def _write(plan: Plan, table: str, rows: Sequence[Row], folder: Path) -> None:
    """``ttft.md`` and ``ttft.png`` in ``folder``."""
    draw(rows, folder / "ttft.png")
    (folder / "ttft.md").write_text(
        f"""# Time to first token

Measured on {datetime.datetime.now(datetime.UTC):%Y-%m-%d} with {os.cpu_count()} cores by `python -m benchmarks.ttft`:
a 16-layer model with 64 KiB of KV per token (bf16), one compute thread for each engine, {plan.rounds} interleaved
rounds. Milliseconds: median (least..most). The single engine's time to first token is prefill alone. Transfer alone
is the KV's size over what one plain socket moved over the same link in the same round. Last byte: from the router's
receipt to the last acknowledged byte. Hand-over: time to first token less prefill's own response time; negative when
the first token came before prefill's reply. Hidden: share of the bytes that were acknowledged before the forward pass
ended.

{table}

![Time to first token and hand-over over prompt length](ttft.png)
"""
    )


def _parse(argv: Sequence[str]) -> Plan:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="prompt lengths, 8,000 at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder for ttft.md and ttft.png (default docs/)")
    parser.add_argument("--quick", action="store_true", help="1 Gbit/s, 512 and 2,048 tokens, one round, no files")
    given = parser.parse_args(argv)
    if given.quick:
        return Plan(("1gbit",), (512, 2048), 1, None)
    return Plan(tuple(given.links), tuple(given.tokens), given.rounds, given.out)


if __name__ == "__main__":
    sys.exit(main(_parse(sys.argv[1:])))
