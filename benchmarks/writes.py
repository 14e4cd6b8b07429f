"""Counts the writes of a layer's push, before and after joining neighbours and fusing requests. No clock.

    .venv/bin/python -m benchmarks.writes --write   all of it, about two minutes; docs/writes.md
    .venv/bin/python -m benchmarks.writes --quick   one pair of TP, half a minute

Batches of 1, 8 and 32 requests of 2,048 tokens are pushed by real ranks, and decode compares every byte. The ranks'
traces tell what each push planned. *Writes before*: one for each block, request and pair of ranks, as layerwise
connectors of today do. *After*: what leaves; neighbouring blocks of one request are one write. *Batches*: what a lane
(one for each pair of ranks) takes from its queue and asks the device about. *Before* is not run, it is so by
construction: one for each request and lane. *After* is counted in the lanes: all requests for one decode rank are one
batch. *Blocks*: where they lie, see ``block_tables.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.block_tables import Placement, block_tables
from benchmarks.figures import format_table, write_page
from benchmarks.kv_shape import KvShape, links_between
from benchmarks.places import open_places
from benchmarks.rank_processes import RankError, RankProcesses, Tp, start_ranks
from benchmarks.ranks import Request
from benchmarks.references import Way

from pdcluster_cli.local.report import read_traces
from pdcluster_protocol.trace import PushTrace

TOKENS: Final = 2048
BATCHES: Final = (1, 8, 32)
BLOCK_SIZES: Final = (16, 128)
TPS: Final = (Tp(1, 1), Tp(2, 1), Tp(1, 2), Tp(4, 2))
_LAYERS: Final = 2
_HEAD_BYTES: Final = 8
"""Small, because only the number of writes matters here."""
_SPARE: Final = 1.5
_TRACE_S: Final = 10.0
COLUMNS: Final = (
    "TP",
    "block size",
    "blocks",
    "requests",
    "writes a layer before",
    "after",
    "fewer by",
    "batches a layer before, by construction",
    "after, counted",
)
NOTE: Final = """
With unequal TP nothing can be joined where it lies, wherever the blocks are. In a head-major block the heads stand
one after the other, so a pair of ranks that shares a part of a block's heads moves one strip of it. The heads of other
ranks lie between the strips of two neighbouring blocks: in decode's memory when prefill's TP is the larger one, else in
prefill's own. A write needs neighbours on both sides. So at 2→1 each of the two lanes still submits 4,096
writes a layer for 32 requests in blocks of 16 tokens. Fusing saves batches there, not writes; larger blocks save
writes: with 128 tokens it is an eighth.

Where decode's TP is the larger one, as 1→2, prefill gathers small strips in staging memory as decode has them, so that
neighbours on decode are enough: [0023](decisions/0023-gathered-strips.md). That is so with TCP, for strips of up to
8 KiB, and where it at least halves the writes. The heads of this table have 8 bytes a token, so that all its strips are
small. With 512 bytes a token, K and V together, strips of 16 tokens are small where a pair of ranks shares one head.

The table counts writes. With TCP each write is a *submit* of its own, which is a call of Mooncake. With RDMA and Ascend
a submit has up to 128 writes, also of several requests, so at best one call carries 128 writes."""


@dataclass(frozen=True, slots=True)
class WritesRow:
    """The figures of one batch of requests. Writes and batches are those of one layer, over all prefill ranks."""

    tp: Tp
    block_size: int
    placement: Placement
    num_requests: int
    before: int
    after: int
    batches_before: int
    batches_after: float

    def cells(self) -> tuple[str, ...]:
        """One text for each of ``COLUMNS``."""
        return (
            str(self.tp),
            str(self.block_size),
            self.placement.value,
            str(self.num_requests),
            f"{self.before:,}",
            f"{self.after:,}",
            f"{self.before / self.after:,.1f}",
            f"{self.batches_before:,}",
            f"{self.batches_after:,g}",
        )


def main(tps: Sequence[Tp], *, write: bool) -> int:
    """Count, print, write. Returns the process's exit status."""
    try:
        rows = [row for tp in tps for block_size in BLOCK_SIZES for row in _count(tp, block_size)]
    except RankError as error:
        print(f"writes: {error}", file=sys.stderr)
        return 1
    table = format_table(COLUMNS, [row.cells() for row in rows])
    print(table)
    if write:
        words = (__doc__ or "").rpartition("\n\n")[2].replace("``", "`")
        write_page("writes", "Writes for each layer", f"{words}{NOTE}\n\n{table}")
    return 0


def _count(tp: Tp, block_size: int) -> Iterator[WritesRow]:
    per_request = TOKENS // block_size
    num_blocks = int(_SPARE * max(BATCHES) * per_request) + 1
    shape = KvShape(block_size, num_blocks, num_layers=_LAYERS, head_bytes=_HEAD_BYTES)
    with (
        tempfile.TemporaryDirectory(prefix="pdcluster-writes-") as folder,
        open_places("loopback") as places,
        start_ranks(places, shape, tp, str(Path(folder) / "trace")) as ranks,
    ):
        for placement in Placement:
            for count in BATCHES:
                yield _count_batch(ranks, Path(folder) / "trace", placement, count)


def _count_batch(ranks: RankProcesses, trace: Path, placement: Placement, count: int) -> WritesRow:
    shape, stamp = ranks.shape, time.monotonic_ns()
    counts = [TOKENS // shape.block_size] * count
    ours, theirs = (block_tables(placement, counts, shape.num_blocks, seed) for seed in (1, 2))
    names = [f"{stamp}-{number}" for number in range(count)]
    moved = ranks.move(Way.CONNECTOR, list(map(Request, names, ours, theirs)))
    num_links = len(links_between(ranks.tp.prefill, ranks.tp.decode, shape))
    pushes = _await_pushes(trace, set(names), count * num_links)
    return WritesRow(
        ranks.tp,
        shape.block_size,
        placement,
        count,
        before=sum(push.ranges for push in pushes) // shape.num_layers,
        after=sum(push.writes for push in pushes) // shape.num_layers,
        batches_before=count * num_links,
        batches_after=moved.num_batches / shape.num_layers,
    )


def _await_pushes(trace: Path, names: set[str], count: int) -> list[PushTrace]:
    """Waits for the trace lines of this batch, and returns them: one for each request and pair of ranks.

    Raises:
        RankError: They do not come within ``_TRACE_S``."""
    deadline = time.monotonic() + _TRACE_S
    while True:
        pushes = [it for it in read_traces([trace]) if isinstance(it, PushTrace) and it.transfer_id in names]
        if len(pushes) == count:
            return pushes
        if time.monotonic() > deadline:
            raise RankError(f"{len(pushes)} of {count} pushes left a line in {trace}")
        time.sleep(0.01)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/writes.md")
    parser.add_argument("--quick", action="store_true", help="TP 2 to 1 only, no file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    given = _parse(sys.argv[1:])
    sys.exit(main((Tp(2, 1),) if given.quick else TPS, write=given.write and not given.quick))
