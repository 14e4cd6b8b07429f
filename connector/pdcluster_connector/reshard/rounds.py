"""The plan of one round: what one prefill rank gathers, sends, receives and places for one layer of one step.

One all-to-all serves all requests of the step and all decode ranks. Each rank's half of it is a ``RegionRound`` for
each region of the layer. Bytes for one peer lie side by side, and both ends go through them in the same order:

    regions in order > families of items in order > decode ranks > owners > supplies of heads > pieces in order

A *family* is all items with the same decode TP size and the same size of a piece. If a layer has more bytes than the
staging buffer holds, its pieces are cut into *rounds* that fit. All ranks cut alike, from the metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdcluster_connector.core.ranges import ByteRanges, Offsets
from pdcluster_connector.core.tp_mapping import Sharding, stripe_tokens
from pdcluster_connector.reshard.feeds import (
    Feed,
    ReshardItem,
    Supply,
    TokenPages,
    TokenShape,
    is_resharded,
    plan_feeds,
)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of one owner, in order: the item and first position of each, and its byte offset in our own region."""

    items: Offsets
    tokens: Offsets
    sources: Offsets
    piece_tokens: int


@dataclass(frozen=True, slots=True)
class StagingPlace:
    """A place in staging memory for one decode rank's pieces: ``[piece][token][decode's heads][cell]`` from ``offset``
    bytes on.

    ``heads``: the heads to fill, counted from decode's first.
    """

    offset: int
    num_pieces: int
    piece_tokens: int
    num_heads: int
    heads: range


@dataclass(frozen=True, slots=True)
class Gather:
    """``heads`` (counted from our first) of ``pieces`` go to ``peer``, from byte ``offset`` of its bytes on."""

    peer: int
    offset: int
    pieces: Pieces
    heads: range


@dataclass(frozen=True, slots=True)
class Landing:
    """The bytes that ``peer`` sends, from byte ``offset`` on, fill ``place``."""

    peer: int
    offset: int
    place: StagingPlace


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """``heads`` (counted from our first) of our own ``pieces`` fill ``place``."""

    pieces: Pieces
    heads: range
    place: StagingPlace


@dataclass(frozen=True, slots=True, eq=False)
class StagedPart:
    """Our part of one item for one decode rank: pieces of ``piece_bytes``, side by side from byte ``offset`` on."""

    item: int
    decode_rank: int
    tokens: Offsets
    offset: int
    piece_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole part."""
        return len(self.tokens) * self.piece_bytes


@dataclass(frozen=True, slots=True)
class RegionRound:
    """Our half of a round for one region. ``sends`` and ``receives``: bytes to and from each rank."""

    gathers: tuple[Gather, ...]
    landings: tuple[Landing, ...]
    copies: tuple[LocalCopy, ...]
    parts: tuple[StagedPart, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    staged_bytes: int
    travels: bool
    """Whether any byte goes from any rank to another."""


@dataclass(frozen=True, slots=True)
class Round:
    """One all-to-all: our half for each region of the layer, in order."""

    regions: tuple[RegionRound, ...]

    @property
    def travels(self) -> bool:
        """Whether the round needs the all-to-all. All ranks have the same answer."""
        return any(region.travels for region in self.regions)

    @property
    def staged_bytes(self) -> int:
        """Staging memory that this rank needs; the regions' bytes follow each other."""
        return sum(region.staged_bytes for region in self.regions)

    @property
    def num_parts(self) -> int:
        """How many parts must be released before the round's buffer is free again."""
        return sum(len(region.parts) for region in self.regions)


@dataclass(frozen=True, slots=True)
class GroupRank:
    """One rank of the prefill TP group."""

    rank: int
    tp_size: int


def plan_rounds(
    us: GroupRank, shapes: Sequence[TokenShape], items: Sequence[ReshardItem], staging_bytes: int
) -> tuple[Round, ...]:
    """The rounds of a layer whose regions have ``shapes``, all of one KV group. Empty when there is nothing to do.

    ``staging_bytes`` bounds what any rank stages in one round; it must be the same on every rank.

    Raises:
        ValueError: An item does not fit its blocks, or one piece does not fit staging memory. Every rank raises alike.
    """
    _require_pieces(shapes, items)
    table = _PieceTable.of(items, shapes[0].pages.block_tokens)
    bounds = _cut(_owned_bytes(us.tp_size, shapes, items, table), staging_bytes)
    cut = (table.between(first, last) for first, last in bounds)
    return tuple(Round(tuple(_plan_region(us, shape, items, part) for shape in shapes)) for part in cut)


def write_rows(part: StagedPart, item: ReshardItem, decode: TokenPages) -> ByteRanges:
    """The fewest ranges that write ``part``: pieces that are adjacent on decode too become one range.

    A source is relative to the buffer of the part's region, a target to decode's region. If decode's pages are not
    padded, a block of decode that the part fills takes one range at most.
    """
    target = decode.offsets(decode.blocks_at(part.tokens, item.start, item.decode_blocks), part.tokens)
    starts = np.flatnonzero(np.diff(target, prepend=-part.piece_bytes - 1) != part.piece_bytes)
    num_pieces = np.diff(np.append(starts, len(target)))
    source = part.offset + starts * part.piece_bytes
    return ByteRanges(source, target[starts], num_pieces * part.piece_bytes, len(target))


@dataclass(frozen=True, slots=True, eq=False)
class _PieceTable:
    """Every wanted piece of every item, in order: its item and its first position."""

    items: Offsets
    tokens: Offsets

    @classmethod
    def of(cls, items: Sequence[ReshardItem], block_tokens: int) -> _PieceTable:
        tokens = [item.wanted_tokens(block_tokens) for item in items]
        numbers = np.repeat(np.arange(len(items)), [len(of_item) for of_item in tokens])
        return cls(numbers.astype(np.int64), np.concatenate([np.empty(0, np.int64), *tokens]))

    def between(self, first: int, last: int) -> _PieceTable:
        return _PieceTable(self.items[first:last], self.tokens[first:last])

    def of_items(self, numbers: Sequence[int]) -> _PieceTable:
        chosen = np.isin(self.items, numbers)
        return _PieceTable(self.items[chosen], self.tokens[chosen])


def _require_pieces(shapes: Sequence[TokenShape], items: Sequence[ReshardItem]) -> None:
    for tokens in {shape.pages.page_tokens for shape in shapes}:
        if wrong := [item for item in items if tokens % item.piece_tokens]:
            raise ValueError(
                f"request {wrong[0].request_id}: pages of {tokens} tokens are not whole pieces of "
                f"{wrong[0].piece_tokens} tokens"
            )


def _families(items: Sequence[ReshardItem]) -> dict[tuple[int, int], list[int]]:
    """(decode TP size, tokens of a piece) to the numbers of that family's items. The families are in order of their
    first items."""
    families: dict[tuple[int, int], list[int]] = {}
    for number, item in enumerate(items):
        families.setdefault((item.decode_tp_size, item.piece_tokens), []).append(number)
    return families


def _feeds(shape: TokenShape, prefill_tp: int, decode_tp: int) -> tuple[Feed, ...]:
    """The feed of every decode rank; empty: blocks move as they are."""
    if not is_resharded(prefill_tp, decode_tp, shape.kv_heads):
        return ()
    return plan_feeds(prefill_tp, decode_tp, shape.kv_heads)


def _owned_bytes(
    prefill_tp: int, shapes: Sequence[TokenShape], items: Sequence[ReshardItem], table: _PieceTable
) -> Offsets:
    """Bytes of each piece that each rank stages: ``[piece, rank]``."""
    owned = np.zeros((len(table.tokens), prefill_tp), np.int64)
    for (decode_tp, piece_tokens), numbers in _families(items).items():
        mine = np.flatnonzero(np.isin(table.items, numbers))
        stripes = table.tokens[mine] // stripe_tokens(piece_tokens)
        for shape in shapes:
            for turns in _bytes_by_turn(prefill_tp, _feeds(shape, prefill_tp, decode_tp)):
                owned[mine] += turns[stripes % len(turns)] * (piece_tokens * shape.cell_bytes)
    return owned


def _bytes_by_turn(prefill_tp: int, feeds: Sequence[Feed]) -> list[Offsets]:
    """For each number of owners n an array ``[stripe modulo n, rank]``: how many heads of a stripe a rank stages."""
    by_count: dict[int, Offsets] = {}
    for feed in feeds:
        count = len(feed.owners)
        turns = by_count.setdefault(count, np.zeros((count, prefill_tp), np.int64))
        for turn, owner in enumerate(feed.owners):
            turns[turn, owner] += len(feed.heads)
    return list(by_count.values())


def _cut(owned: Offsets, staging_bytes: int) -> Iterator[tuple[int, int]]:
    """The pieces cut into the longest spans [first, last) of which no rank stages more than ``staging_bytes``.

    Raises:
        ValueError: One piece has more bytes.
    """
    total = np.concatenate([np.zeros((1, owned.shape[1]), np.int64), owned.cumsum(axis=0)])
    first = 0
    while first < len(owned) and (total[-1] > total[first]).any():
        ends = [int(np.searchsorted(column, column[first] + staging_bytes, side="right")) for column in total.T]
        last = min(ends) - 1
        if last <= first:
            raise ValueError(
                f"one piece of {int(owned[first].max())} bytes does not fit staging memory of {staging_bytes} bytes"
            )
        yield first, last
        first = last


def _plan_region(us: GroupRank, shape: TokenShape, items: Sequence[ReshardItem], table: _PieceTable) -> RegionRound:
    draft = _Draft(us, shape)
    for (decode_tp, piece_tokens), numbers in _families(items).items():
        feeds = _feeds(shape, us.tp_size, decode_tp)
        part = table.of_items(numbers)
        if feeds and len(part.tokens):
            sources = _sources(shape.pages, items, part)
            draft.add_family(feeds, Pieces(part.items, part.tokens, sources, piece_tokens))
    return draft.finish()


def _sources(pages: TokenPages, items: Sequence[ReshardItem], table: _PieceTable) -> Offsets:
    numbers, starts = np.unique(table.items, return_index=True)
    blocks = [
        pages.blocks_at(tokens, items[number].start, items[number].prefill_blocks)
        for number, tokens in zip(numbers.tolist(), np.split(table.tokens, starts[1:]), strict=True)
    ]
    return pages.offsets(np.concatenate(blocks), table.tokens)


@dataclass(slots=True)
class _Draft:
    """Builds a ``RegionRound``. Every rank adds the same items in the same order."""

    us: GroupRank
    shape: TokenShape
    gathers: list[Gather] = field(default_factory=list)
    landings: list[Landing] = field(default_factory=list)
    copies: list[LocalCopy] = field(default_factory=list)
    parts: list[StagedPart] = field(default_factory=list)
    sends: list[int] = field(init=False)
    receives: list[int] = field(init=False)
    staged_bytes: int = 0
    travels: bool = False

    def __post_init__(self) -> None:
        self.sends, self.receives = [0] * self.us.tp_size, [0] * self.us.tp_size

    def add_family(self, feeds: Sequence[Feed], pieces: Pieces) -> None:
        owned: dict[tuple[int, int], Pieces] = {}
        for feed in feeds:
            for turn, owner in enumerate(feed.owners):
                share = (turn, len(feed.owners))
                if share not in owned:
                    owned[share] = _owned_by(pieces, *share)
                if len(owned[share].tokens):
                    self._add(feed, owner, owned[share], feed.supplies[turn])

    def finish(self) -> RegionRound:
        lists = tuple(self.gathers), tuple(self.landings), tuple(self.copies), tuple(self.parts)
        return RegionRound(*lists, tuple(self.sends), tuple(self.receives), self.staged_bytes, self.travels)

    def _add(self, feed: Feed, owner: int, pieces: Pieces, supplies: Sequence[Supply]) -> None:
        for supply in supplies:
            self.travels |= supply.rank != owner
            if owner == self.us.rank:
                self._receive(supply, pieces, self._place(feed, pieces, supply))
            elif supply.rank == self.us.rank:
                self._send(supply, pieces, owner)
        if owner == self.us.rank:
            self._stage(feed, pieces)

    def _send(self, supply: Supply, pieces: Pieces, owner: int) -> None:
        self.gathers.append(Gather(owner, self.sends[owner], pieces, self._our(supply.heads)))
        self.sends[owner] += self._num_bytes(pieces, len(supply.heads))

    def _receive(self, supply: Supply, pieces: Pieces, place: StagingPlace) -> None:
        if supply.rank == self.us.rank:
            self.copies.append(LocalCopy(pieces, self._our(supply.heads), place))
            return
        self.landings.append(Landing(supply.rank, self.receives[supply.rank], place))
        self.receives[supply.rank] += self._num_bytes(pieces, len(supply.heads))

    def _place(self, feed: Feed, pieces: Pieces, supply: Supply) -> StagingPlace:
        heads = _shifted(supply.heads, -feed.heads.start)
        return StagingPlace(self.staged_bytes, len(pieces.tokens), pieces.piece_tokens, len(feed.heads), heads)

    def _stage(self, feed: Feed, pieces: Pieces) -> None:
        """One part for each item; ``pieces`` are in order of items."""
        piece_bytes = self._num_bytes(pieces, len(feed.heads)) // len(pieces.tokens)
        numbers, starts = np.unique(pieces.items, return_index=True)
        for number, first, tokens in zip(
            numbers.tolist(), starts.tolist(), np.split(pieces.tokens, starts[1:]), strict=True
        ):
            offset = self.staged_bytes + first * piece_bytes
            self.parts.append(StagedPart(number, feed.decode_rank, tokens, offset, piece_bytes))
        self.staged_bytes += piece_bytes * len(pieces.tokens)

    def _our(self, heads: range) -> range:
        return _shifted(heads, -Sharding(self.us.tp_size, self.shape.kv_heads).heads_of(self.us.rank).start)

    def _num_bytes(self, pieces: Pieces, num_heads: int) -> int:
        return len(pieces.tokens) * pieces.piece_tokens * num_heads * self.shape.cell_bytes


def _owned_by(pieces: Pieces, turn: int, count: int) -> Pieces:
    if count == 1:
        return pieces
    chosen = pieces.tokens // stripe_tokens(pieces.piece_tokens) % count == turn
    return Pieces(pieces.items[chosen], pieces.tokens[chosen], pieces.sources[chosen], pieces.piece_tokens)


def _shifted(heads: range, by: int) -> range:
    return range(heads.start + by, heads.stop + by)
