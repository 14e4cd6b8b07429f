"""A link: all that one prefill rank writes into one decode rank, worked out alike on both ends.

Regions are paired by layer name and by their order within a layer. Prefill makes byte ranges of a link; decode works
out the number of bytes that it is owed. Regions that do not fit are refused here, before any byte is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn, TypeAlias

from msgspec.structs import replace

from pdcluster_connector.core.ranges import CopyShape, Grid, TokenSpan, bytes_of
from pdcluster_connector.core.state_runs import RunCopy, described, plan_runs, require_whole
from pdcluster_connector.core.tp_mapping import WHOLE, RankPush, Sharding, Share, plan_pushes
from pdcluster_protocol.bounds import MAX_BYTES, MAX_SIDE
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout

_RegionKey: TypeAlias = tuple[str, int, int]
"""Layer name, number of the region among its layer's regions, KV group."""


@dataclass(frozen=True, slots=True)
class RegionCopy:
    """One region's source and target: base addresses in bytes, and how each block is copied.

    If a state is split anew, each of its runs has a copy of its own. ``source_index``, ``target_index``: the region's
    index in prefill's layout and in decode's. ``shape``: index into ``Link.shapes``. ``is_resharded``: the bytes come
    from staging memory, not from the region; the shape's source then only tells in which blocks prefill holds which
    tokens.
    """

    layer_name: str
    source_index: int
    target_index: int
    source_base: int
    target_base: int
    shape: int
    is_resharded: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """Copies in prefill's order of regions, and the few shapes of these copies.

    ``coverage``: the number of heads in decode's regions that this link fills; a share of a head counts as a fraction.
    The coverages of all links into a decode rank add up to its ``full_coverage``.
    """

    copies: tuple[RegionCopy, ...]
    shapes: tuple[CopyShape, ...]
    coverage: Fraction

    def owed_bytes(self, spans: Sequence[Sequence[TokenSpan]]) -> int:
        """The bytes that prefill must write when decode wants ``spans`` (per group, token positions)."""
        per_shape = [bytes_of(shape, spans[shape.group]) for shape in self.shapes]
        return sum(per_shape[copy.shape] for copy in self.copies)


@dataclass(frozen=True, slots=True)
class _Ends:
    prefill: RankLayout
    decode: RankLayout


@dataclass(frozen=True, slots=True)
class _Planned:
    shape: CopyShape
    coverage: Fraction
    is_resharded: bool = False


def require_possible(rank: RankLayout, who: str) -> None:
    """The sizes and numbers of ``rank`` are within bounds. Checked before a link is planned: planning takes time and
    memory in proportion to them.

    Raises:
        ProtocolError: A size or number is out of bounds. Names it.
    """
    if not (0 < rank.tp_size <= MAX_SIDE and 0 < rank.num_stages <= MAX_SIDE):
        raise ProtocolError(
            f"{who} says TP {rank.tp_size} in {rank.num_stages} stages: each is to be in [1, {MAX_SIDE}]"
        )
    if not (0 <= rank.tp_rank < rank.tp_size and 0 <= rank.stage < rank.num_stages):
        raise ProtocolError(
            f"{who} says rank {rank.tp_rank} of TP {rank.tp_size} in stage {rank.stage} of {rank.num_stages}: "
            "ranks and stages are counted from 0"
        )
    for region in rank.regions:
        _require_memory(region, who)
        require_whole(region, rank)


def plan_link(prefill: RankLayout, decode: RankLayout) -> Link:
    """The link between two ranks; without copies where they share no byte.

    Raises:
        ProtocolError: The engines have different layers, or hold a layer differently. Names both values and the cure.
    """
    places = {key: place for place, (key, _) in enumerate(_numbered(decode.regions))}
    decode = owed_by(prefill, decode)
    targets, ends = dict(_numbered(decode.regions)), _Ends(prefill, decode)
    if prefill.num_stages > 1 or decode.num_stages > 1:
        ours = [(index, pair) for index, pair in enumerate(_numbered(prefill.regions)) if pair[0] in targets]
    else:
        ours = list(enumerate(_numbered(prefill.regions)))
        _require_same_layers({key for _, (key, _) in ours}, targets.keys())
    shapes: dict[CopyShape, int] = {}
    copies, coverage = [], Fraction(0)
    for index, (key, source) in ours:
        for planned in _plan_region(source, targets[key], ends):
            number = shapes.setdefault(planned.shape, len(shapes))
            ends_of_copy = index, places[key], source.base, targets[key].base
            copies.append(RegionCopy(source.layer_name, *ends_of_copy, number, planned.is_resharded))
            coverage += planned.coverage
    return Link(tuple(copies), tuple(shapes), coverage)


def plan_direct_shapes(link: Link, prefill: RankLayout, decode: RankLayout) -> dict[int, CopyShape]:
    """For each resharded region, by its index in prefill's layout, the shape that writes it straight from its blocks.

    With it each prefill rank writes its own heads, a write for each token, and needs no other rank. All ranks together
    write each cell once. 8 heads, TP 2 to TP 1: rank 1 writes heads 4..7 of every token.
    """
    ends = _Ends(prefill, decode)
    pairs = [(copy.source_index, copy.target_index) for copy in link.copies if copy.is_resharded]
    return {ours: _plan_direct_shape(prefill.regions[ours], decode.regions[theirs], ends) for ours, theirs in pairs}


def owed_by(prefill: RankLayout, decode: RankLayout) -> RankLayout:
    """``decode`` with only those regions that prefill must fill: no region of a draft model if prefill has none.

    Decode's draft model then guesses without the prompt's KV, and vLLM checks its guesses like any others. A prefill
    engine that speculates has a single stage (``vllm/facts.py``), so each of its ranks has the draft model's layers.

    Raises:
        ProtocolError: A region is the draft model's on decode and the model's own on prefill.
    """
    if prefill.has_draft or not decode.has_draft:
        return decode
    drafts = {region.layer_name for region in decode.regions if region.is_draft}
    if disputed := sorted(drafts & {region.layer_name for region in prefill.regions}):
        raise ProtocolError(
            f"layer {disputed[0]} is the model's own on prefill, a draft model's on decode: "
            "give both the same --speculative-config"
        )
    return replace(decode, regions=tuple(region for region in decode.regions if not region.is_draft))


def _require_memory(region: RegionLayout, who: str) -> None:
    """The region's pages do not overlap, and int64 holds the address of its last byte."""
    if region.page_bytes > region.page_stride:
        raise ProtocolError(
            f"{who} has pages of {region.page_bytes} bytes with a stride of {region.page_stride} bytes in layer "
            f"{region.layer_name}: the stride must be {region.page_bytes} or more"
        )
    if (end := region.base + region.span_bytes) > MAX_BYTES:
        raise ProtocolError(f"{who} says that layer {region.layer_name} ends at address {end}: the last is {MAX_BYTES}")


def full_coverage(decode: RankLayout) -> Fraction:
    """The sum of the coverages of all links into ``decode`` if each of its bytes has a writer. ``decode``: as
    ``owed_by`` returns it."""
    return Fraction(sum(_local_heads(region, decode) for region in decode.regions))


def _require_same_layers(ours: AbstractSet[_RegionKey], theirs: AbstractSet[_RegionKey]) -> None:
    if differing := sorted(f"{name}[{index}] of group {group}" for name, index, group in ours ^ theirs):
        raise ProtocolError(
            f"prefill and decode do not both have KV regions {', '.join(differing[:4])}: serve one model, "
            "with one draft model, and the same --disable-hybrid-kv-cache-manager on both"
        )


def _plan_region(source: RegionLayout, target: RegionLayout, ends: _Ends) -> Iterator[_Planned]:
    if (source.kind, source.heads) != (target.kind, target.heads):
        _refuse(source, f"{_kind(source)} on prefill, {_kind(target)} on decode", "use one attention backend on both")
    _require_whole_windows(source, target)
    if source.kind is RegionKind.STATE:
        yield from _plan_state(source, target, ends)
        return
    plan = _plan_tokens if source.kind is RegionKind.TOKENS else _plan_rows
    if (planned := plan(source, target, ends)) is not None:
        yield planned


def _require_whole_windows(source: RegionLayout, target: RegionLayout) -> None:
    """Prefill has all tokens of the decode block in which a window begins, also those before the window.

    A sliding window may begin at any token. With blocks of 32 tokens on decode and 16 on prefill, decode's first block
    may begin 16 tokens before the first token that prefill still has. The tokens in the window alone are not enough:
    vLLM gives the block to decode's prefix cache, and a later request with a shorter prompt reads earlier tokens of it.
    """
    ours, theirs = source.block_tokens, target.block_tokens
    if theirs > ours and source.window_step % theirs:
        _refuse(
            source,
            f"a window, in blocks of {ours} tokens on prefill, {theirs} on decode",
            "start both with the same --block-size",
        )


def _plan_rows(source: RegionLayout, target: RegionLayout, ends: _Ends) -> _Planned | None:
    """Head-major: in a page, each head's tokens lie side by side in a row."""
    push = _push_between(source, ends)
    if push is None:
        return None
    cell = _common_cell(source, target, ends)
    unit, step = _unit(source, target), min(source.page_tokens, target.page_tokens)
    num_rows = len(push.heads)
    is_joined = source.page_tokens == target.page_tokens
    shape = CopyShape(
        source.group,
        _row_grid(source, ends.prefill, push, cell),
        _row_grid(target, ends.decode, push, cell),
        unit,
        step,
        1 if is_joined else num_rows,
        step * cell * (num_rows if is_joined else 1),
        push.share,
    )
    return _Planned(shape, Fraction(len(push.heads), push.share.count))


def _plan_tokens(source: RegionLayout, target: RegionLayout, ends: _Ends) -> _Planned | None:
    """Token-major: if both ranks hold the same heads, whole blocks are copied, else prefill reshards them first."""
    cell, mine = _common_cell(source, target, ends), ends.prefill.tp_rank
    pushes = plan_pushes(_sharding(source, ends.prefill), _sharding(source, ends.decode))
    writers = sorted({push.prefill_rank for push in pushes if push.decode_rank == ends.decode.tp_rank})
    if mine not in writers:
        return None
    held, wanted = _heads_of(source, ends.prefill), _heads_of(target, ends.decode)
    share = Share(writers.index(mine), len(writers))
    is_resharded = held != wanted
    ours, theirs = _token_grid(source, cell * len(held)), _token_grid(target, cell * len(wanted))
    step = min(source.page_tokens, target.page_tokens)
    shape = CopyShape(source.group, ours, theirs, _unit(source, target), step, 1, step * cell * len(wanted), share)
    return _Planned(shape, Fraction(len(wanted), share.count), is_resharded)


def _plan_direct_shape(source: RegionLayout, target: RegionLayout, ends: _Ends) -> CopyShape:
    push, cell = _push_between(source, ends), _common_cell(source, target, ends)
    assert push is not None, f"layer {source.layer_name} is resharded for a rank that gets no head of ours"
    ours, theirs = (
        _grid(region, 0, cell * len(held), cell * (push.heads.start - held.start))
        for region, held in ((source, _heads_of(source, ends.prefill)), (target, _heads_of(target, ends.decode)))
    )
    return CopyShape(source.group, ours, theirs, _unit(source, target), 1, 1, cell * len(push.heads), push.share)


def _plan_state(source: RegionLayout, target: RegionLayout, ends: _Ends) -> Iterator[_Planned]:
    """With equal TP each rank's state moves whole to the same TP rank of decode; else each run of it is split anew."""
    _require_same_state(source, target, ends)
    if ends.prefill.tp_size != ends.decode.tp_size:
        for copy in plan_runs(source, target, ends.prefill, ends.decode):
            yield _planned_run(source, target, copy)
    elif ends.prefill.tp_rank == ends.decode.tp_rank:
        yield _planned_run(source, target, RunCopy(0, 0, 0, 0, 1, source.page_bytes))


def _require_same_state(source: RegionLayout, target: RegionLayout, ends: _Ends) -> None:
    ours, theirs = ends.prefill.tp_size, ends.decode.tp_size
    if ours == theirs and source.page_bytes != target.page_bytes:
        _refuse(
            source, f"{source.page_bytes} bytes of state on prefill, {target.page_bytes} on decode",
            "serve one model, with the same --speculative-config",
        )  # fmt: skip
    if ours != theirs and not (source.runs and target.runs):
        _refuse(
            source, f"a state whose split is not known, with TP {ours} on prefill, {theirs} on decode",
            "give both the same --tensor-parallel-size",
        )  # fmt: skip
    here, there = described(source, ends.prefill), described(target, ends.decode)
    if here != there:
        _refuse(
            source, f"state in runs (units, bytes, rows) {here} on prefill, {there} on decode",
            "serve one model, with the same --speculative-config",
        )  # fmt: skip


def _planned_run(source: RegionLayout, target: RegionLayout, copy: RunCopy) -> _Planned:
    ours = _grid(source, copy.source_stride, 0, copy.source_offset)
    theirs = _grid(target, copy.target_stride, 0, copy.target_offset)
    shape = CopyShape(source.group, ours, theirs, 1, 1, copy.num_rows, copy.row_bytes, WHOLE, is_state=True)
    return _Planned(shape, Fraction(copy.num_bytes, target.page_bytes))


def _row_grid(region: RegionLayout, rank: RankLayout, push: RankPush, cell: int) -> Grid:
    row = region.page_tokens * cell
    first = push.heads.start - _heads_of(region, rank).start
    return _grid(region, row, cell, first * row)


def _token_grid(region: RegionLayout, token_bytes: int) -> Grid:
    return _grid(region, 0, token_bytes, 0)


def _grid(region: RegionLayout, row: int, token: int, offset: int) -> Grid:
    return Grid(region.block_tokens, region.block_stride, region.page_tokens, region.page_stride, row, token, offset)


def _common_cell(source: RegionLayout, target: RegionLayout, ends: _Ends) -> int:
    """Bytes of one token in one head, the same on both engines."""
    ours, theirs = _cell(source, ends.prefill), _cell(target, ends.decode)
    if ours != theirs:
        _refuse(source, f"{ours} bytes a token on prefill, {theirs} on decode", "use one --kv-cache-dtype on both")
    return ours


def _cell(region: RegionLayout, rank: RankLayout) -> int:
    cells = _local_heads(region, rank) * region.page_tokens
    if region.page_bytes % cells:
        _refuse(region, f"pages of {region.page_bytes} bytes for {cells} cells", "report this layout")
    return region.page_bytes // cells


def _unit(source: RegionLayout, target: RegionLayout) -> int:
    """Tokens in the smaller block. Of the two block sizes, one divides the other; likewise of the two page sizes."""
    for ours, theirs, option in (
        (source.block_tokens, target.block_tokens, "--block-size"),
        (source.page_tokens, target.page_tokens, "kernel block size"),
    ):
        if max(ours, theirs) % min(ours, theirs):
            _refuse(source, f"{option} {ours} on prefill, {theirs} on decode", "one must divide the other")
    if source.page_tokens != target.page_tokens and not (source.is_linear and target.is_linear):
        _refuse(
            source, f"pages of {source.page_tokens} tokens on prefill, {target.page_tokens} on decode, which this "
            "attention backend cannot cut", "start both with the same --block-size",
        )  # fmt: skip
    return min(source.block_tokens, target.block_tokens)


def _push_between(region: RegionLayout, ends: _Ends) -> RankPush | None:
    pushes = plan_pushes(_sharding(region, ends.prefill), _sharding(region, ends.decode))
    ranks = (ends.prefill.tp_rank, ends.decode.tp_rank)
    return next((push for push in pushes if (push.prefill_rank, push.decode_rank) == ranks), None)


def _sharding(region: RegionLayout, rank: RankLayout) -> Sharding:
    try:
        return Sharding(rank.tp_size, region.heads)
    except ValueError as error:
        raise ProtocolError(f"layer {region.layer_name}: {error}") from error


def _heads_of(region: RegionLayout, rank: RankLayout) -> range:
    return _sharding(region, rank).heads_of(rank.tp_rank)


def _local_heads(region: RegionLayout, rank: RankLayout) -> int:
    return len(_heads_of(region, rank)) if region.has_tokens else 1


def _kind(region: RegionLayout) -> str:
    return f"{region.kind.value} KV of {region.heads} heads"


def _refuse(region: RegionLayout, values: str, cure: str) -> NoReturn:
    raise ProtocolError(f"layer {region.layer_name} has {values}: {cure}")


def _numbered(regions: Sequence[RegionLayout]) -> Iterator[tuple[_RegionKey, RegionLayout]]:
    """Each region with its layer's name, its place among the regions of that layer, and its group."""
    seen: Counter[str] = Counter()
    for region in regions:
        yield (region.layer_name, seen[region.layer_name], region.group), region
        seen[region.layer_name] += 1
