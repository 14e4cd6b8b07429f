"""Which memory of a prefill rank goes into which memory of a decode rank.

A *region* is one layer's KV memory in one rank (``RegionLayout``). Two engines agree on layer names,
so regions are paired by name and by their order within a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pdcluster_connector.core.regions import BlockSlice, block_slice
from pdcluster_connector.core.tp_mapping import Push, Sharding
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.side_channel import RegionLayout


@dataclass(frozen=True, slots=True)
class RegionPair:
    """One layer's source and target: base addresses in bytes, and which part of each block moves."""

    layer_name: str
    group: int
    source_base: int
    target_base: int
    part: BlockSlice


@dataclass(frozen=True, slots=True)
class RankPair:
    """A prefill rank and a decode rank, with the sharding of their engines."""

    prefill: Sharding
    decode: Sharding
    push: Push


def pair_regions(
    ours: Sequence[RegionLayout], theirs: Sequence[RegionLayout], ranks: RankPair
) -> tuple[RegionPair, ...]:
    """A source and a target for each region of ours, in our order.

    Raises:
        ProtocolError: The engines do not have the same layers, groups or bytes per head.
    """
    targets = {_key(region, index): region for region, index in _numbered(theirs)}
    sources = {_key(region, index): region for region, index in _numbered(ours)}
    if sources.keys() != targets.keys():
        missing = sorted(f"{name}[{index}]" for name, index, _ in sources.keys() ^ targets.keys())
        raise ProtocolError(f"prefill and decode do not both have KV regions {', '.join(missing[:4])}: serve one model")
    return tuple(_pair(source, targets[key], ranks) for key, source in sources.items())


def bytes_per_block(regions: Sequence[RegionLayout], ranks: RankPair, group: int) -> int:
    """Bytes that one block of ``group`` adds to the push from ``ranks.push.prefill_rank``, over all layers.

    Decode's side of the count: ``regions`` are the decode rank's own.
    """
    heads, mine = len(ranks.push.heads), len(ranks.decode.heads_of(ranks.push.decode_rank))
    return sum(region.block_bytes * heads // mine for region in regions if region.group == group)


def _pair(source: RegionLayout, target: RegionLayout, ranks: RankPair) -> RegionPair:
    try:
        part = block_slice(ranks.prefill, ranks.decode, ranks.push, source.block_bytes, target.block_bytes)
    except ValueError as error:
        raise ProtocolError(f"layer {source.layer_name}: {error}: start both with the same --block-size") from error
    return RegionPair(source.layer_name, source.group, source.base, target.base, part)


def _numbered(regions: Sequence[RegionLayout]) -> list[tuple[RegionLayout, int]]:
    """Each region with its place among the regions of the same layer."""
    seen: Counter[str] = Counter()
    numbered = []
    for region in regions:
        numbered.append((region, seen[region.layer_name]))
        seen[region.layer_name] += 1
    return numbered


def _key(region: RegionLayout, index: int) -> tuple[str, int, int]:
    return region.layer_name, index, region.group
