"""Measures the bandwidth of our connector's push beside that of the link, and the cost of its lanes, for any TP.

    .venv/bin/python -m benchmarks.push_bandwidth --write   all of it, about 10 minutes; docs/push-bandwidth.{md,png}
    .venv/bin/python -m benchmarks.push_bandwidth --quick   loopback, TP 1→1 and 2→1, two rounds, half a minute

Four ways move one request of 2,048 tokens (64 KiB of KV a token in 16 layers), in turn in every round. They use the
same processes (one for each rank) and links: see ``references.py``. Before each transfer, outside of the clock,
prefill's blocks get new bytes and decode's are wiped. After it decode compares every byte; a wrong one ends the
program with status 1. Only the plain socket is exempt: its bytes have no place of their own. Needs root but for
``--links loopback``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.bandwidth_figures import BandwidthRow, build_rows, format_rows
from benchmarks.block_tables import Placement, block_tables
from benchmarks.figures import DOCS, format_minutes, write_page
from benchmarks.kv_shape import KvShape
from benchmarks.link import LinkError
from benchmarks.places import LINKS, Places, open_places, share_places
from benchmarks.rank_processes import Moved, RankError, RankProcesses, Tp, start_ranks
from benchmarks.ranks import Request
from benchmarks.references import Way

TOKENS: Final = 2048
BLOCK_SIZES: Final = (16, 128)
TPS: Final = (Tp(1, 1), Tp(2, 1), Tp(1, 2), Tp(4, 2))
_SPARE: Final = 2
"""Size of the pool over that of the request, so that scattered blocks have holes between them."""
_SEED: Final = 5
_START_S: Final = 4.0
_TRANSFER_S: Final = {"loopback": 0.15, "1gbit": 1.15, "2gbit": 0.6}
"""For the estimate only."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases to measure. ``links``: keys of ``LINKS``."""

    links: tuple[str, ...]
    tps: tuple[Tp, ...]
    block_sizes: tuple[int, ...]
    placements: tuple[Placement, ...]
    rounds: int
    write: bool

    @property
    def seconds(self) -> float:
        """An estimate."""
        cases = len(self.tps) * len(self.block_sizes)
        transfers = len(self.placements) * (self.rounds + 1) * len(Way)
        starts = len(list(share_places(self.links))) * cases * _START_S
        return starts + cases * transfers * sum(_TRANSFER_S[link] for link in self.links)


def main(plan: Plan) -> int:
    """Measure, print, write. Returns the process's exit status."""
    print(f"takes {format_minutes(plan.seconds)}", flush=True)
    try:
        rows = [row for links in share_places(plan.links) for row in _measure_links(links, plan)]
    except (LinkError, RankError) as error:
        print(f"push_bandwidth: {error}", file=sys.stderr)
        return 1
    print(f"\n{format_rows(rows)}")
    if plan.write:
        _write(rows)
    return 0


def _measure_links(links: Sequence[str], plan: Plan) -> Iterator[BandwidthRow]:
    with open_places(links[0]) as places:
        for tp in plan.tps:
            for block_size in plan.block_sizes:
                yield from _measure_ranks(places, links, plan, tp, block_size)


def _measure_ranks(places: Places, links: Sequence[str], plan: Plan, tp: Tp, block_size: int) -> Iterator[BandwidthRow]:
    shape = KvShape(block_size, num_blocks=_SPARE * TOKENS // block_size + 1)
    with start_ranks(places, shape, tp) as ranks:
        for link in links:
            places.set_rate(link)
            for placement in plan.placements:
                rounds = list(_run_rounds(ranks, placement, plan.rounds))
                rows = build_rows(f"{LINKS[link]}", f"{tp}", block_size, placement, rounds)
                print(format_rows(rows).partition("\n")[2].partition("\n")[2], flush=True)
                yield from rows


def _run_rounds(ranks: RankProcesses, placement: Placement, count: int) -> Iterator[dict[Way, Moved]]:
    """Takes all ways in every round, in rotating order. One more round goes before these, which opens connections."""
    ways = list(Way)
    for number in range(-1, count):
        turn = number % len(ways)
        taken = {way: ranks.move(way, [_request(ranks.shape, placement)]) for way in (*ways[turn:], *ways[:turn])}
        if number >= 0:
            yield taken


def _request(shape: KvShape, placement: Placement) -> Request:
    count = TOKENS // shape.block_size
    ours, theirs = (block_tables(placement, (count,), shape.num_blocks, seed)[0] for seed in (_SEED, _SEED + 1))
    return Request(f"request-{time.monotonic_ns()}", ours, theirs)


def _write(rows: Sequence[BandwidthRow]) -> None:
    from benchmarks.bandwidth_plot import draw  # not in the ranks' processes, which import this file

    draw(rows, DOCS / "push-bandwidth.png")
    words = (__doc__ or "").rpartition("\n\n")[2].replace("``", "`")
    plot = "![Share of the best reference's bandwidth](push-bandwidth.png)"
    write_page("push_bandwidth", "Push bandwidth beside the link", f"{words}\n{NOTE}\n\n{format_rows(rows)}\n\n{plot}")


NOTE: Final = """
Ratios compare transfers of the same round: median (least..most). *To the best* compares with the reference that has the
best median; bare Mooncake is what a connector on Mooncake can reach at most. Our time begins before the grant is asked
for and ends when decode's forward thread hears that the request is there; a reference's ends with its last
acknowledgement. *Drivers* is the processor time of our lanes, or of the references' threads, over all prefill ranks, as
a share of one core. *Senders* is that of the whole processes, with Mooncake's own threads and the kernel's copies."""


def _parse(argv: Sequence[str]) -> Plan:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--tp", nargs="+", type=_parse_tp, default=list(TPS), metavar="P-D", help="such as 2-1")
    parser.add_argument("--block-sizes", nargs="+", type=int, default=list(BLOCK_SIZES))
    parser.add_argument("--placements", nargs="+", choices=[it.name.lower() for it in Placement], default=["used"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write docs/push-bandwidth.{md,png}")
    parser.add_argument("--quick", action="store_true", help="a look: no link, two pairs, two rounds")
    given = parser.parse_args(argv)
    if given.quick:
        return Plan(("loopback",), TPS[:2], BLOCK_SIZES[:1], (Placement.USED,), 2, write=False)
    placements = tuple(Placement[name.upper()] for name in given.placements)
    return Plan(tuple(given.links), tuple(given.tp), tuple(given.block_sizes), placements, given.rounds, given.write)


def _parse_tp(text: str) -> Tp:
    prefill, _, decode = text.partition("-")
    return Tp(int(prefill), int(decode))


if __name__ == "__main__":
    sys.exit(main(_parse(sys.argv[1:])))
