"""How recurrent state (Mamba, gated delta net) goes from the ranks of one TP size to those of another.

A state holds no tokens. Several projections of a layer each leave a part in it, and TP shards each part by a count of
its own. A *run* is such a part (``StateRun``). A *unit* is the smallest piece of a run that a rank holds whole.

    page of a rank, gated delta net, layout SD: 3 rows of [q | k | v], then one row of the rank's heads
    page of a rank, Mamba2, layout SD:          3 rows of [x | B | C], then one row of the rank's heads
    layout DS:                                  one row each of q, k, v, then the heads

Prefill writes the units that both ranks hold, row by row. Every rank holds B and C of a model with one group: one
prefill rank writes them to each decode rank. Source of truth: vLLM 0.32 ``mamba_mixer2.py``,
``mamba_v2_sharded_weight_loader``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdcluster_connector.core.tp_mapping import Sharding, units_pushed
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.side_channel import RankLayout, RegionLayout, StateRun


@dataclass(frozen=True, slots=True)
class RunCopy:
    """Rows that one rank writes into another. Offsets and strides are bytes in the page of each rank."""

    source_offset: int
    source_stride: int
    target_offset: int
    target_stride: int
    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


def require_whole(region: RegionLayout, rank: RankLayout) -> None:
    """The runs of ``region``, if it has any, fill its page, and ``rank`` has whole units of each run.

    Raises:
        ProtocolError: The numbers do not fit. Names them.
    """
    for run in region.runs:
        units, end = len(units_of(run, rank)), run.offset + (run.num_rows - 1) * run.row_stride + run.row_bytes
        if end > region.page_bytes or run.row_bytes % units:
            raise ProtocolError(
                f"layer {region.layer_name} has a run of {run.num_rows} rows of {run.row_bytes} bytes for {units} "
                f"units that ends at {end} in pages of {region.page_bytes}: report this layout"
            )
    held = sum(run.num_rows * run.row_bytes for run in region.runs)
    if region.runs and held != region.page_bytes:
        raise ProtocolError(
            f"layer {region.layer_name} has runs of {held} bytes in pages of {region.page_bytes}: report this layout"
        )


def described(region: RegionLayout, rank: RankLayout) -> list[tuple[int, int, int]]:
    """(units, bytes of a unit in a row, rows) of each run. Every rank of every engine of one model has the same."""
    return [(run.units, unit_bytes(run, rank), run.num_rows) for run in region.runs]


def units_of(run: StateRun, rank: RankLayout) -> range:
    """The units that ``rank`` holds.

    Raises:
        ProtocolError: The run's units cannot be spread over the TP size of ``rank``.
    """
    return _sharding(run, rank).heads_of(rank.tp_rank)


def unit_bytes(run: StateRun, rank: RankLayout) -> int:
    """Bytes of one unit in one row."""
    return run.row_bytes // len(units_of(run, rank))


def shared_units(source: StateRun, target: StateRun, prefill: RankLayout, decode: RankLayout) -> range:
    """The units of a run that the prefill rank writes into the decode rank."""
    return units_pushed(_sharding(source, prefill), prefill.tp_rank, _sharding(target, decode), decode.tp_rank)


def plan_runs(source: RegionLayout, target: RegionLayout, prefill: RankLayout, decode: RankLayout) -> Iterator[RunCopy]:
    """The rows of a state that the prefill rank writes into the decode rank. Both must describe the state alike."""
    for ours, theirs in zip(source.runs, target.runs, strict=True):
        if units := shared_units(ours, theirs, prefill, decode):
            size = unit_bytes(ours, prefill)
            begins = (
                run.offset + (units.start - units_of(run, rank).start) * size
                for run, rank in ((ours, prefill), (theirs, decode))
            )
            source_offset, target_offset = begins
            yield RunCopy(
                source_offset, ours.row_stride, target_offset, theirs.row_stride, ours.num_rows, len(units) * size
            )


def _sharding(run: StateRun, rank: RankLayout) -> Sharding:
    try:
        return Sharding(rank.tp_size, run.units)
    except ValueError as error:
        raise ProtocolError(
            f"{run.units} heads or groups of a state cannot be spread over TP {rank.tp_size}: choose a "
            "--tensor-parallel-size that divides them, or is a multiple of them"
        ) from error
