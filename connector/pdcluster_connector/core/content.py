"""Chooses the cells of a rank's KV that are compared with the other engine's. Both engines choose the same.

A *cell* is the content of one token in one head of one layer. Both engines add up a number for each cell that is
counted (``worker/content_sums.py``). The sums of all prefill ranks together equal decode's, whatever the TP sizes,
block sizes and order. This module finds cells by a rank's own block table, without the code that plans a push
(``ranges.py``): a mistake in that code must not make the sums wrong too.

    range of tokens   0    1    2   ...
    layer 0, head 0   .    .    .       -> rows[0]      a fault in one cell changes one row's sum and one range's:
    layer 0, head 1   .    X    .       -> rows[1] !    the fault is where both cross
           ...        v    v    v
              ranges[0]  [1]!  [2]

So a few sums are enough to name the layer, head and tokens of a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import Final

import numpy as np

from pdcluster_connector.core.ranges import Offsets, Spans, TokenSpan
from pdcluster_connector.core.state_runs import shared_units, units_of
from pdcluster_connector.core.tp_mapping import WHOLE, Sharding, Share, plan_pushes, stripe_tokens
from pdcluster_protocol.params import ContentCheck
from pdcluster_protocol.side_channel import ContentSums, RankLayout, RegionLayout

RANGE_TOKENS: Final = 256
"""Tokens in a range of a full comparison; doubled until there are at most ``MAX_RANGES`` ranges."""
MAX_RANGES: Final = 1024
SAMPLED_TOKENS: Final = 16
"""Tokens in a range of a sampled comparison."""
TOKENS_OF_A_SAMPLE: Final = 256
"""Prompt tokens for each sample. The cost of comparing is then in proportion to the prompt, up to ``MAX_SAMPLES``."""
MAX_SAMPLES: Final = 64


@dataclass(frozen=True, slots=True)
class ContentPart:
    """The cells of one region that a rank counts in its sums. ``rows``: KV heads, counted from the rank's first.

    ``target``: index of the region in the decode rank. ``target_row``: the first of ``rows`` as decode counts heads.
    """

    region: int
    rows: range
    target: int
    target_row: int = 0
    share: Share = WHOLE
    stripe: int = 1
    run: int | None = None
    """Index of the run, in a state whose runs are known. ``rows`` are then units of the run, and the first of ``rows``
    is unit ``first_unit`` of the whole model. The sums have one row for the whole state."""
    first_unit: int = 0


@dataclass(frozen=True, slots=True)
class Cells:
    """Where a rank keeps cells, in order of position. ``slots``: the tokens' places in their pages. All arrays have the
    same length."""

    positions: Offsets
    pages: Offsets
    slots: Offsets


def parts_received(decode: RankLayout, *, has_draft: bool = False) -> tuple[ContentPart, ...]:
    """All cells that a decode rank keeps of the model, and with ``has_draft`` of the draft model."""
    return tuple(
        part
        for index, region in enumerate(decode.regions)
        if has_draft or not region.is_draft
        for part in _kept(index, region, decode)
    )


def parts_pushed(prefill: RankLayout, decode: RankLayout) -> tuple[ContentPart, ...]:
    """The parts that a prefill rank counts for a decode rank. All prefill ranks together count each cell once."""
    targets = {name: index for index, name in _named(decode)}
    return tuple(
        part
        for index, name in _named(prefill)
        if name in targets
        for part in _shared(index, targets[name], prefill, decode)
    )


@dataclass(frozen=True, slots=True)
class ContentPlan:
    """The cells of a decode rank that are counted, and the numbers of their sums. Both engines make the same plan."""

    layout: RankLayout
    range_tokens: int
    numbers: tuple[int, ...]
    """The numbers of all ranges that are counted, ascending. Range n begins at position n * ``range_tokens``."""
    picks: Mapping[int, tuple[int, ...]]
    """For each region that is counted, by index: the numbers of its ranges."""
    is_whole: bool = True
    row_starts: Mapping[int, int] = field(default_factory=dict)
    num_rows: int = 0
    wanted: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """For each region that decode wants, by index: the numbers of its ranges, whether they are counted or not."""

    def spans_of(self, target: int) -> tuple[TokenSpan, ...]:
        """The positions of a region that are counted; empty: all that decode wants."""
        return () if self.is_whole else tuple(map(self.span_of, self.picks[target]))

    def span_of(self, number: int) -> TokenSpan:
        """Positions of one range."""
        return number * self.range_tokens, (number + 1) * self.range_tokens

    def slots_of(self, positions: Offsets) -> Offsets:
        """For each position the index of the range that counts it. A page may reach beyond the ranges: a position
        there counts in the last range before it, or in the first range."""
        found: Offsets = np.searchsorted(self.numbers, positions // self.range_tokens, side="right") - 1
        return found.clip(0)

    def rows_of(self) -> Iterator[tuple[int, int]]:
        """(index of decode's region, KV head of the whole model) of each row of the sums."""
        for index in self.picks:
            yield from ((index, head) for head in _heads_of(self.layout.regions[index], self.layout))


@dataclass(frozen=True, slots=True)
class Found:
    """The sums of a request's content on a decode rank, and the plan that says which cells each sum counts."""

    plan: ContentPlan
    sums: ContentSums


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The places on decode whose content may differ from what was pushed: the cells of ``regions`` in ``ranges``.

    After a sampled comparison these are all places that were pushed: the content between the samples may be wrong too.
    """

    regions: tuple[int, ...]
    ranges: tuple[TokenSpan, ...]
    reason: str


def plan_content(check: ContentCheck, decode: RankLayout, spans: Spans, seed: str) -> ContentPlan:
    """The plan for a request of which decode wants ``spans`` (per KV group). ``seed`` chooses the samples."""
    tokens = SAMPLED_TOKENS if check is ContentCheck.SAMPLED else _range_tokens(spans)
    by_group = {group: _numbers(of_group, tokens) for group, of_group in enumerate(spans) if of_group}
    wanted = {index: by_group[region.group] for index, region in enumerate(decode.regions) if region.group in by_group}
    is_whole = check is not ContentCheck.SAMPLED
    own = [index for index in wanted if not decode.regions[index].is_draft]
    picks = wanted if is_whole else _sampled(wanted, own, spans, f"{seed}/{decode.rank}")
    numbers = tuple(sorted(set().union(*picks.values())))
    sizes = [len(_heads_of(decode.regions[index], decode)) for index in picks]
    starts = dict(zip(picks, accumulate(sizes, initial=0), strict=False))
    return ContentPlan(decode, tokens, numbers, picks, is_whole, starts, sum(sizes), wanted)


def find_mismatch(found: Found, pushed: Sequence[ContentSums]) -> Mismatch | None:
    """The places where decode's sums differ from the total of its prefill ranks; None: there are none.

    Raises:
        ValueError: A prefill rank and decode have different numbers of sums.
    """
    plan, here = found.plan, found.sums
    rows = _differing(here.rows, [sums.rows for sums in pushed])
    columns = _differing(here.ranges, [sums.ranges for sums in pushed])
    if not len(rows) and not len(columns):
        return None
    # Several faults may cancel each other by chance in all rows, or in all ranges. All of these are then suspect.
    heads = list(plan.rows_of())
    places = [heads[row] for row in (rows if len(rows) else range(plan.num_rows))]
    numbers = [plan.numbers[column] for column in (columns if len(columns) else range(len(plan.numbers)))]
    reason = _where(plan, places, numbers)
    if not plan.is_whole:
        last = max(of_region[-1] for of_region in plan.wanted.values())
        return Mismatch(tuple(plan.wanted), ((0, plan.span_of(last)[1]),), reason)
    regions = tuple(dict.fromkeys(region for region, _ in places))
    return Mismatch(regions, tuple(map(plan.span_of, numbers)), reason)


def common_spans(first: Sequence[TokenSpan], second: Sequence[TokenSpan]) -> list[TokenSpan]:
    """Positions that both have, ascending."""
    crossed = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return sorted((start, stop) for start, stop in crossed if start < stop)


def _differing(here: bytes, pushed: Sequence[bytes]) -> Sequence[int]:
    """Indices at which decode's sums differ from prefill's total. Raises: ValueError: The numbers of sums differ."""
    if wrong := [sums for sums in pushed if len(sums) != len(here)]:
        raise ValueError(f"prefill has {len(wrong[0]) // 8} sums of content, decode has {len(here) // 8}")
    total = np.zeros(len(here) // 8, np.uint64)
    for sums in pushed:
        total += np.frombuffer(sums, "<u8")
    found: list[int] = np.flatnonzero(total != np.frombuffer(here, "<u8")).tolist()
    return found


def _where(plan: ContentPlan, places: Sequence[tuple[int, int]], numbers: Sequence[int]) -> str:
    """The first place that differs, in words, and how many other ranges and regions differ."""
    (region, _), (start, stop) = places[0], plan.span_of(numbers[0])
    heads = [head for index, head in places if index == region]
    layer, others = plan.layout.regions[region].layer_name, len({index for index, _ in places}) - 1
    more = f", and in {others} other regions" if others else ""
    return (
        f"the content is not what was pushed: layer {layer}, KV heads {_runs(heads)}, tokens {start} to {stop - 1} of "
        f"{len(numbers)} ranges{more}"
    )


def _runs(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0 to 5 (4)"."""
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first} to {last} ({len(numbers)})"


def _range_tokens(spans: Spans) -> int:
    tokens, last = RANGE_TOKENS, max((stop for of_group in spans for _, stop in of_group), default=0)
    while -(-last // tokens) > MAX_RANGES:
        tokens *= 2
    return tokens


def _numbers(spans: Sequence[TokenSpan], tokens: int) -> tuple[int, ...]:
    found = {n for start, stop in spans for n in range(start // tokens, -(-stop // tokens))}
    return tuple(sorted(found))


def _sampled(
    wanted: Mapping[int, Sequence[int]], own: Iterable[int], spans: Spans, seed: str
) -> dict[int, tuple[int, ...]]:
    """The sampled ranges of each region: the last range of the model's last region, which is written last, and ranges
    that ``seed`` chooses, spread over the regions. ``own``: the model's own regions, without a draft model's, on which
    no answer depends."""
    if not wanted:
        return {}
    num_tokens = max(sum(stop - start for start, stop in of_group) for of_group in spans)
    regions, last = list(wanted), max(own, default=max(wanted))
    found: dict[int, set[int]] = {last: {wanted[last][-1]}}
    begin, num = _number_of(seed), min(MAX_SAMPLES, num_tokens // TOKENS_OF_A_SAMPLE + 1)
    for turn in range(num):
        region = regions[(begin + turn * _stride(len(regions))) % len(regions)]
        choice = _number_of(f"{seed}/{turn}") % len(wanted[region])
        found.setdefault(region, set()).add(wanted[region][choice])
    return {region: tuple(sorted(found[region])) for region in sorted(found)}


def _stride(num: int) -> int:
    """A step of about two thirds of ``num`` that shares no factor with ``num``, so it visits each number once."""
    return next(step for step in range(max(1, num * 2 // 3), num + 2) if np.gcd(step, num) == 1)


def _number_of(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def cells_of(
    part: ContentPart,
    region: RegionLayout,
    spans: Sequence[TokenSpan],
    table: Sequence[int],
    ranges: Sequence[TokenSpan] = (),
) -> Cells:
    """Where ``region`` keeps the cells of ``spans`` that ``part`` counts. If there are ``ranges``: only cells in them.

    ``table``: the request's blocks from its first position on; for state, its one block.
    """
    blocks = np.asarray(table, np.int64)
    if not region.has_tokens:
        # The rows of a state's run are few: each counts as if it were a token. A state without runs is one row.
        slots = np.arange(1 if part.run is None else region.runs[part.run].num_rows, dtype=np.int64)
        return Cells(slots, np.repeat(blocks[:1] * region.pages_per_block, len(slots)), slots)
    positions = _positions(part, region, spans, ranges)
    inside = positions % region.block_tokens
    pages = blocks[positions // region.block_tokens] * region.pages_per_block + inside // region.page_tokens
    return Cells(positions, pages, inside % region.page_tokens)


def _positions(
    part: ContentPart, region: RegionLayout, spans: Sequence[TokenSpan], ranges: Sequence[TokenSpan]
) -> Offsets:
    """The positions that are counted: each token of ``spans``, or whole pages of ``spans`` where a token's content is
    spread over its page (vLLM's CPU kernels).

    A draft model goes on writing guesses behind the prompt while the prompt's KV is pushed (vLLM 0.32
    ``v1/spec_decode/llm_base_proposer.py``, ``propose``). So a whole page of its KV is counted only if the prompt
    fills the page.
    """
    whole = 1 if region.is_linear else region.page_tokens
    beyond = 0 if region.is_draft else whole - 1
    runs = _merged((start // whole * whole, (stop + beyond) // whole * whole) for start, stop in spans)
    parts = [np.arange(*run) for run in (common_spans(runs, ranges) if ranges else runs)]
    positions = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    shared: Offsets = positions[positions // part.stripe % part.share.count == part.share.index]
    return shared


def _merged(spans: Iterable[TokenSpan]) -> list[TokenSpan]:
    """``spans`` sorted, and joined where they touch or overlap."""
    found: list[TokenSpan] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _shared(index: int, target_index: int, prefill: RankLayout, decode: RankLayout) -> Iterator[ContentPart]:
    region, target = prefill.regions[index], decode.regions[target_index]
    if region.runs:
        yield from _shared_runs(index, target_index, prefill, decode)
        return
    if not region.has_tokens:
        if prefill.tp_rank == decode.tp_rank:
            yield ContentPart(index, range(1), target_index)
        return
    stripe = stripe_tokens(min(region.page_tokens, target.page_tokens))
    mine, theirs = _heads_of(region, prefill), _heads_of(target, decode)
    for push in plan_pushes(_sharding(region, prefill), _sharding(target, decode)):
        if (push.prefill_rank, push.decode_rank) == (prefill.tp_rank, decode.tp_rank):
            rows = range(push.heads.start - mine.start, push.heads.stop - mine.start)
            yield ContentPart(index, rows, target_index, push.heads.start - theirs.start, push.share, stripe)


def _kept(index: int, region: RegionLayout, rank: RankLayout) -> Iterator[ContentPart]:
    if region.runs:
        yield from (_run(index, index, n, units_of(run, rank), 0) for n, run in enumerate(region.runs))
        return
    yield ContentPart(index, range(len(_heads_of(region, rank))), index)


def _shared_runs(index: int, target_index: int, prefill: RankLayout, decode: RankLayout) -> Iterator[ContentPart]:
    runs = zip(prefill.regions[index].runs, decode.regions[target_index].runs, strict=True)
    for number, (ours, theirs) in enumerate(runs):
        if units := shared_units(ours, theirs, prefill, decode):
            yield _run(index, target_index, number, units, units.start - units_of(ours, prefill).start)


def _run(index: int, target_index: int, number: int, units: range, first: int) -> ContentPart:
    """A part that has ``units`` of a run. ``first``: the first of ``units``, counted from the rank's first unit."""
    rows = range(first, first + len(units))
    return ContentPart(index, rows, target_index, run=number, first_unit=units.start)


def _sharding(region: RegionLayout, rank: RankLayout) -> Sharding:
    return Sharding(rank.tp_size, region.heads)


def _heads_of(region: RegionLayout, rank: RankLayout) -> range:
    return _sharding(region, rank).heads_of(rank.tp_rank) if region.has_tokens else range(1)


def _named(layout: RankLayout) -> Iterator[tuple[int, str]]:
    """Each region's index, and a name for the region that is the same on both engines."""
    seen: Counter[str] = Counter()
    for index, region in enumerate(layout.regions):
        yield index, f"{region.layer_name}[{seen[region.layer_name]}] of group {region.group}"
        seen[region.layer_name] += 1
