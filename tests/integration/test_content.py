"""Content is compared on both engines: what counts cannot see is found out. Real ranks and Mooncake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from integration.broken import Permuting, WrappedSessions
from integration.ranks import BLOCK_SIZE, HEAD_BYTES, Cache, Pair, Shape, engine_facts, fingerprint_of, make_pair
from pdcluster_connector.assembly import make_decode_rank, make_prefill_rank
from pdcluster_connector.settings import Settings
from pdcluster_protocol.labels import Role

OURS, THEIRS = [3, 4, 5, 9], [8, 9, 2, 30]
ROW: Final = BLOCK_SIZE * HEAD_BYTES
"""Bytes of one head in a block; a block has two."""


def breaks_by(pair: Pair, piece_bytes: int, place_of: Callable[[int], int]) -> None:
    """Prefill writes pieces of each layer in other places than it plans."""
    begin, worker = pair.target.layers.ctypes.data, pair.prefill.worker
    sessions = WrappedSessions(worker._parts.sessions, lambda inner: Permuting(inner, begin, piece_bytes, place_of))
    worker._parts = replace(worker._parts, sessions=sessions)


def turned(cell: int) -> int:
    """[heads][tokens] of a block as [tokens][heads]."""
    block, inside = divmod(cell, 2 * BLOCK_SIZE)
    head, token = divmod(inside, BLOCK_SIZE)
    return block * 2 * BLOCK_SIZE + token * 2 + head


FAULTS: Final[dict[str, tuple[int, Callable[[int], int]]]] = {
    "two heads": (ROW, lambda row: row ^ 1),
    "two blocks": (2 * ROW, lambda block: block ^ 1 if block % 64 in (8, 9) else block),
    "two tokens": (HEAD_BYTES, lambda cell: cell ^ 1),
    "heads and tokens": (HEAD_BYTES, turned),
    "halves of a cell": (HEAD_BYTES // 2, lambda half: half ^ 1),
    "two layers": (2 * ROW, lambda block: block ^ Shape().num_blocks),
}


def test_content_that_arrives_where_it_belongs_is_received() -> None:
    with make_pair() as pair:
        pair.compare("a", OURS, THEIRS)
        assert pair.step_until(lambda: "a" in pair.ended)
        assert pair.ended["a"]
        pair.step(finished=["a"])
        assert pair.step_until(lambda: "a" in pair.released)


@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_changed_places_passes_the_counts_and_not_the_comparison(fault: str) -> None:
    with make_pair() as pair:
        breaks_by(pair, *FAULTS[fault])
        pair.expect("counted", 4)
        pair.forward(pair.slice_of("counted", OURS, THEIRS))
        assert pair.step_until(lambda: "counted" in pair.ended)
        assert pair.ended["counted"], "as many bytes as decode expects"
        pair.compare("compared", OURS, THEIRS)
        assert pair.step_until(lambda: "compared" in pair.ended)
        assert not pair.ended["compared"]
        (lost,) = pair.losses
        assert "the content is not what was pushed: its digest is " in lost.reason


def test_tensors_whose_heads_and_tokens_one_side_reads_the_other_way_are_found_out() -> None:
    """As it is with a layout that is misread: every byte goes where the plan says, and means something else."""
    shape, settings = Shape(), Settings(quarantine_s=0.5, hold_s=0.5, lease_s=2.0)
    source, target = Cache(shape), Cache(shape)
    source.fill(1)
    print_of = fingerprint_of(shape)
    turned_views = tuple(
        view.reshape(shape.num_blocks, BLOCK_SIZE, shape.kv_heads, HEAD_BYTES).transpose(1, 2)
        for view in source.views()
    )
    decode = make_decode_rank(engine_facts(Role.DECODE, shape, settings), target.memory(print_of))
    prefill = make_prefill_rank(
        engine_facts(Role.PREFILL, shape, settings), replace(source.memory(print_of), views=turned_views)
    )
    try:
        pair = Pair(prefill, decode, source, target)
        pair.compare("a", OURS, THEIRS)
        assert pair.step_until(lambda: "a" in pair.ended)
        assert not pair.ended["a"]
        assert "the content is not what was pushed" in pair.losses[0].reason
    finally:
        prefill.close()
        decode.close()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_rank_that_cannot_read_its_own_kv_verifies_nothing(side: str) -> None:
    shape, settings = Shape(), Settings(quarantine_s=0.5, hold_s=0.5, lease_s=2.0)
    source, target = Cache(shape), Cache(shape)
    whole = fingerprint_of(shape)
    memories = {"prefill": source.memory(whole), "decode": target.memory(whole)}
    memories[side] = replace(memories[side], views=())
    decode = make_decode_rank(engine_facts(Role.DECODE, shape, settings), memories["decode"])
    prefill = make_prefill_rank(engine_facts(Role.PREFILL, shape, settings), memories["prefill"])
    try:
        pair = Pair(prefill, decode, source, target)
        pair.compare("a", OURS, THEIRS)
        assert pair.step_until(lambda: "a" in pair.ended)
        assert not pair.ended["a"]
    finally:
        prefill.close()
        decode.close()
