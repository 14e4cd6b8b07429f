"""What the references write arrives whole, each byte once, and a wrong byte is found wherever it lies."""

from __future__ import annotations

import pytest
from benchmarks.kv_content import KvWords, Piece
from benchmarks.kv_shape import KvShape, Range, TpRank, links_between, ranges_between

SHAPE = KvShape(block_size=16, num_blocks=9, num_layers=2, kv_heads=8, head_bytes=8)
OURS, THEIRS = (3, 1, 2), (7, 4, 5)
ONE = TpRank(0, 1)


class Engine:
    """The memory of all ranks of one engine, and what checks each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memories = [bytearray(SHAPE.rank_bytes(size)) for _ in range(size)]
        self.words = [KvWords(SHAPE, TpRank(rank, size), it) for rank, it in enumerate(self.memories)]

    def wrong(self, name: str) -> list[Piece]:
        return [piece for words in self.words for piece in words.wrong_pieces(name, THEIRS)]


def pushed(prefill_size: int, decode_size: int, layers: int = SHAPE.num_layers) -> tuple[Engine, int]:
    """A decode engine to which the first ``layers`` of request a were moved, and the number of bytes written."""
    prefill, decode = Engine(prefill_size), Engine(decode_size)
    for words in prefill.words:
        words.fill("a", OURS)
    num_bytes = 0
    for source, target in links_between(prefill_size, decode_size, SHAPE):
        rows = ranges_between(SHAPE, (source, target), OURS, THEIRS)
        for row in rows[: len(rows) * layers // SHAPE.num_layers]:
            taken = prefill.memories[source.rank][row.source : row.source + row.num_bytes]
            decode.memories[target.rank][row.target : row.target + row.num_bytes] = taken
            num_bytes += row.num_bytes
    return decode, num_bytes


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)])
def test_a_push_is_right_for_any_pair_of_tp_and_half_of_one_is_wrong_in_the_other_half(
    prefill: int, decode: int
) -> None:
    whole, num_bytes = pushed(prefill, decode)
    assert whole.wrong("a") == []
    assert num_bytes == SHAPE.request_bytes(len(OURS))
    assert len(links_between(prefill, decode, SHAPE)) == max(prefill, decode)
    half = pushed(prefill, decode, layers=1)[0].wrong("a")
    assert {piece.layer for piece in half} == {1}
    assert len(half) == len(THEIRS) * SHAPE.kv_heads


@pytest.mark.parametrize("at", [0, 1, 127, 128, SHAPE.block_bytes(2) - 1])
@pytest.mark.parametrize(("layer", "position"), [(0, 0), (1, 2)])
def test_one_wrong_bit_is_found_where_it_lies_and_told(at: int, layer: int, position: int) -> None:
    decode, _ = pushed(1, 2)
    block = THEIRS[position]
    decode.memories[1][(layer * SHAPE.num_blocks + block) * SHAPE.block_bytes(2) + at] ^= 1
    wrong = Piece(layer, position, block, 4 + at // (SHAPE.head_bytes * SHAPE.block_size))
    assert decode.wrong("a") == [wrong]
    assert decode.words[1].describe_wrong("a", THEIRS) == f"1 of 24 pieces of a, the first in {wrong}"


def test_blocks_of_another_request_or_at_each_others_place_or_wiped_are_wrong() -> None:
    decode, _ = pushed(1, 1)
    words = decode.words[0]
    assert words.describe_wrong("a", THEIRS) == ""
    assert len(decode.wrong("b")) == SHAPE.num_layers * len(THEIRS) * SHAPE.kv_heads
    assert {piece.position for piece in words.wrong_pieces("a", (4, 7, 5))} == {0, 1}
    words.wipe(THEIRS[:1])
    assert {piece.position for piece in decode.wrong("a")} == {0}


@pytest.mark.parametrize(
    ("ranks", "ours", "theirs", "expected"),
    [
        ((ONE, ONE), (1, 2), (5, 6), [Range(1024, 5 * 1024, 2048), Range(10 * 1024, 14 * 1024, 2048)]),
        ((ONE, ONE), (2, 1), (6, 5), [Range(1024, 5 * 1024, 2048), Range(10 * 1024, 14 * 1024, 2048)]),
        ((ONE, ONE), (1, 2), (6, 5), [
            *(Range(1024, 6 * 1024, 1024), Range(2048, 5 * 1024, 1024)),
            *(Range(10 * 1024, 15 * 1024, 1024), Range(11 * 1024, 14 * 1024, 1024))]),
        ((TpRank(1, 2), ONE), (1,), (1,), [Range(512, 1536, 512), Range(10 * 512, 10 * 1024 + 512, 512)]),
    ],
    ids=["neighbours", "neighbours that fall", "neighbours on one side only", "half of the heads"],
)  # fmt: skip
def test_a_reference_writes_the_fewest_ranges(
    ranks: tuple[TpRank, TpRank], ours: tuple[int, ...], theirs: tuple[int, ...], expected: list[Range]
) -> None:
    """Else it would look slower than it is."""
    assert ranges_between(SHAPE, ranks, ours, theirs) == expected
