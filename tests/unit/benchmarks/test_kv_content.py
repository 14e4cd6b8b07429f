"""A wrong byte in decode's blocks is found, whoever wrote it and wherever it lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import pytest
from benchmarks.kv_content import KvWords, Piece
from benchmarks.kv_shape import KvShape, TpRank, links_between, ranges_between

SHAPE = KvShape(block_size=16, num_blocks=9, num_layers=2, kv_heads=8, head_bytes=8)
OURS, THEIRS = (3, 1, 2), (7, 4, 5)
PAIRS = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)]


@dataclass(slots=True)
class Engine:
    """The memory of all ranks of one engine, and what checks each."""

    size: int
    memories: list[bytearray] = field(init=False)
    words: list[KvWords] = field(init=False)

    def __post_init__(self) -> None:
        self.memories = [bytearray(SHAPE.rank_bytes(self.size)) for _ in range(self.size)]
        self.words = [KvWords(SHAPE, TpRank(rank, self.size), it) for rank, it in enumerate(self.memories)]

    def fill(self, name: str) -> None:
        for words in self.words:
            words.fill(name, OURS)

    def wrong(self, name: str) -> list[Piece]:
        return [piece for words in self.words for piece in words.wrong_pieces(name, THEIRS)]


def copy(prefill: Engine, decode: Engine, share: float = 1.0) -> None:
    """Move the ranges of the request, or the first ``share`` of each link's."""
    for source, target in links_between(prefill.size, decode.size, SHAPE):
        rows = ranges_between(SHAPE, (source, target), OURS, THEIRS)
        for row in islice(rows, int(len(rows) * share)):
            taken = prefill.memories[source.rank][row.source : row.source + row.num_bytes]
            decode.memories[target.rank][row.target : row.target + row.num_bytes] = taken


def pushed(prefill_size: int, decode_size: int) -> Engine:
    """A decode engine to which everything was moved."""
    prefill, decode = Engine(prefill_size), Engine(decode_size)
    prefill.fill("a")
    copy(prefill, decode)
    return decode


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_a_whole_push_is_right_for_any_pair_of_tp(prefill: int, decode: int) -> None:
    assert pushed(prefill, decode).wrong("a") == []


@pytest.mark.parametrize("at", [0, 1, 127, 128, SHAPE.block_bytes(2) - 1])
@pytest.mark.parametrize(("layer", "position"), [(0, 0), (1, 2)])
def test_one_wrong_bit_is_found_where_it_lies(at: int, layer: int, position: int) -> None:
    decode = pushed(1, 2)
    block = THEIRS[position]
    decode.memories[1][(layer * SHAPE.num_blocks + block) * SHAPE.block_bytes(2) + at] ^= 1
    head = 4 + at // (SHAPE.head_bytes * SHAPE.block_size)
    assert decode.wrong("a") == [Piece(layer, position, block, head)]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_a_push_that_wrote_half_is_wrong_in_the_other_half(prefill: int, decode: int) -> None:
    source, target = Engine(prefill), Engine(decode)
    source.fill("a")
    copy(source, target, share=0.5)
    assert {piece.layer for piece in target.wrong("a")} == {1}
    assert len(target.wrong("a")) == len(THEIRS) * SHAPE.kv_heads


def test_blocks_at_each_others_place_are_wrong() -> None:
    words = KvWords(SHAPE, TpRank(0, 1), bytearray(SHAPE.rank_bytes(1)))
    words.fill("a", (1, 2))
    assert {piece.position for piece in words.wrong_pieces("a", (2, 1))} == {0, 1}


def test_what_an_earlier_request_left_behind_is_wrong_in_every_piece() -> None:
    assert len(pushed(1, 1).wrong("b")) == SHAPE.num_layers * len(THEIRS) * SHAPE.kv_heads


def test_wiped_blocks_are_wrong_and_their_neighbours_still_right() -> None:
    decode = pushed(1, 1)
    decode.words[0].wipe(THEIRS[:1])
    assert {piece.position for piece in decode.wrong("a")} == {0}


def test_the_words_name_how_much_is_wrong_and_the_first_place() -> None:
    decode = pushed(1, 1)
    assert decode.words[0].describe_wrong("a", THEIRS) == ""
    decode.memories[0][SHAPE.block_bytes(1) * 4 + 200] ^= 255
    said = "1 of 48 pieces of a, the first in layer 0, position 1 (block 4), head 1"
    assert decode.words[0].describe_wrong("a", THEIRS) == said
