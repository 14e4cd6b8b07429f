"""For every legal pair of shardings, the push plan is complete, honest and even."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_connector.core.tp_mapping import (
    RankPush,
    Sharding,
    Share,
    plan_pushes,
    related_ranks,
    stripe_tokens,
    target_ranks,
    units_pushed,
)


@st.composite
def engine_pairs(draw: st.DrawFn) -> tuple[Sharding, Sharding]:
    heads = draw(st.integers(1, 48))
    legal = [tp for tp in range(1, 97) if heads % tp == 0 or tp % heads == 0]
    return Sharding(draw(st.sampled_from(legal)), heads), Sharding(draw(st.sampled_from(legal)), heads)


@given(engine_pairs())
def test_every_decode_rank_receives_each_of_its_heads_exactly_once(
    pair: tuple[Sharding, Sharding],
) -> None:
    prefill, decode = pair
    received: Counter[tuple[int, int]] = Counter()
    for p in plan_pushes(prefill, decode):
        assert 0 <= p.share.index < p.share.count
        for head in p.heads:
            received[p.decode_rank, head] += Fraction(1, p.share.count)  # type: ignore[assignment]  # parts of a head
    wanted = {(r, h) for r in range(decode.tp_size) for h in decode.heads_of(r)}
    assert set(received) == wanted
    assert set(received.values()) == {1}


@given(engine_pairs())
def test_the_shares_of_a_head_are_all_different(pair: tuple[Sharding, Sharding]) -> None:
    pushes = plan_pushes(*pair)
    shares = Counter((p.decode_rank, head, p.share.index) for p in pushes for head in p.heads)
    assert set(shares.values()) == {1}


@given(engine_pairs())
def test_no_rank_sends_heads_it_does_not_hold(pair: tuple[Sharding, Sharding]) -> None:
    prefill, decode = pair
    for push in plan_pushes(prefill, decode):
        assert set(push.heads) <= set(prefill.heads_of(push.prefill_rank))


@given(engine_pairs())
def test_replicas_share_the_sending_evenly(pair: tuple[Sharding, Sharding]) -> None:
    prefill, decode = pair
    load = dict.fromkeys(range(prefill.tp_size), Fraction(0))
    for push in plan_pushes(prefill, decode):
        load[push.prefill_rank] += Fraction(len(push.heads), push.share.count)
    assert max(load.values()) - min(load.values()) <= 1
    assert min(load.values()) > 0, "a link of the cluster would stand idle"


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "kv_heads", "pushes"),
    [
        pytest.param(2, 2, 8, [(0, 0, 0, 4), (1, 1, 4, 8)], id="equal TP is one to one"),
        pytest.param(4, 2, 8, [(0, 0, 0, 2), (1, 0, 2, 4), (2, 1, 4, 6), (3, 1, 6, 8)], id="P > D"),
        pytest.param(1, 2, 8, [(0, 0, 0, 4), (0, 1, 4, 8)], id="P < D"),
        pytest.param(3, 2, 6, [(0, 0, 0, 2), (1, 0, 2, 3), (1, 1, 3, 4), (2, 1, 4, 6)], id="no multiples"),
    ],
)
def test_known_plans(prefill_tp: int, decode_tp: int, kv_heads: int, pushes: list[tuple[int, int, int, int]]) -> None:
    plan = plan_pushes(Sharding(prefill_tp, kv_heads), Sharding(decode_tp, kv_heads))
    assert plan == tuple(RankPush(p, d, range(a, b)) for p, d, a, b in pushes)


def test_every_rank_that_holds_a_latent_pushes_a_share_of_it() -> None:
    plan = plan_pushes(Sharding(4, 1), Sharding(2, 1))
    head = range(1)
    assert plan == (
        RankPush(0, 0, head, Share(0, 2)),
        RankPush(1, 0, head, Share(1, 2)),
        RankPush(2, 1, head, Share(0, 2)),
        RankPush(3, 1, head, Share(1, 2)),
    )


def test_sixteen_ranks_of_a_latent_deal_it_out_to_four() -> None:
    """DeepSeek-R1 with prefill TP 16 and decode as four engines (data parallel) of TP 4: this is what each gets."""
    plan = plan_pushes(Sharding(16, 1), Sharding(4, 1))
    assert plan == tuple(RankPush(rank, rank // 4, range(1), Share(rank % 4, 4)) for rank in range(16))


def test_a_pair_is_related_when_any_layer_of_the_model_says_so() -> None:
    def related(prefill_tp: int, decode_tp: int, *kv_heads: int) -> frozenset[tuple[int, int]]:
        return related_ranks(prefill_tp, decode_tp, kv_heads, has_state=False)

    assert related(2, 2, 8) == {(0, 0), (1, 1)}
    assert related(4, 1, 2, 8) == {(0, 0), (1, 0), (2, 0), (3, 0)}
    latent = {(0, 0), (0, 1), (1, 2)}
    assert related(2, 3, 1) == latent
    assert related(2, 3, 1, 6) == latent | {(1, 1)}, "a draft model whose heads meet in the middle"
    with pytest.raises(ValueError, match="8 KV heads cannot be spread over TP 3"):
        related(3, 1, 3, 8)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "pairs"),
    [
        (2, 2, {(0, 0), (1, 1)}),
        (1, 2, {(0, 0), (0, 1)}),
        (4, 2, {(0, 0), (1, 0), (2, 1), (3, 1)}),
        (2, 3, {(0, 0), (0, 1), (1, 1), (1, 2)}),
    ],
)
def test_ranks_whose_shares_of_a_state_overlap_are_related(
    prefill_tp: int, decode_tp: int, pairs: set[tuple[int, int]]
) -> None:
    assert related_ranks(prefill_tp, decode_tp, [], has_state=True) == pairs
    assert related_ranks(prefill_tp, decode_tp, [1], has_state=True) >= pairs, "beside a latent"


@pytest.mark.parametrize(
    ("tp_sizes", "units", "pushed"),
    [
        ((1, 2), 8, {(0, 0): (0, 4), (0, 1): (4, 8)}),
        ((4, 2), 8, {(0, 0): (0, 2), (1, 0): (2, 4), (2, 1): (4, 6), (3, 1): (6, 8)}),
        ((3, 2), 6, {(0, 0): (0, 2), (1, 0): (2, 3), (1, 1): (3, 4), (2, 1): (4, 6)}),
        ((4, 2), 1, {(0, 0): (0, 1), (2, 1): (0, 1)}),
        ((2, 4), 1, {(0, 0): (0, 1), (0, 1): (0, 1), (1, 2): (0, 1), (1, 3): (0, 1)}),
        ((8, 1), 2, {(0, 0): (0, 1), (4, 0): (1, 2)}),
    ],
)
def test_each_unit_of_a_state_has_one_pusher(
    tp_sizes: tuple[int, int], units: int, pushed: dict[tuple[int, int], tuple[int, int]]
) -> None:
    ours, theirs = (Sharding(tp_size, units) for tp_size in tp_sizes)
    ranks = ((p, d) for p in range(ours.tp_size) for d in range(theirs.tp_size))
    found = {pair: units_pushed(ours, pair[0], theirs, pair[1]) for pair in ranks}
    assert {pair: (run.start, run.stop) for pair, run in found.items() if run} == pushed


def test_engines_of_different_models_are_refused() -> None:
    with pytest.raises(ValueError, match="KV heads differ"):
        plan_pushes(Sharding(2, 8), Sharding(2, 4))


@pytest.mark.parametrize(("tp_size", "kv_heads"), [(3, 8), (8, 3), (0, 8), (2, 0)])
def test_a_sharding_that_would_split_a_head_is_refused(tp_size: int, kv_heads: int) -> None:
    words = rf"{kv_heads} KV heads cannot be spread over TP {tp_size}: .*-parallel-size that divides .* a multiple"
    with pytest.raises(ValueError, match=words):
        Sharding(tp_size, kv_heads)


@pytest.mark.parametrize(
    ("prefill_rank", "prefill_tp", "decode_tp", "decode_stages", "ranks"),
    [
        (0, 1, 1, 1, [0]),
        (1, 2, 2, 2, [1, 3]),
        (0, 1, 2, 3, [0, 1, 2, 3, 4, 5]),
        (3, 4, 2, 2, [1, 3]),
        (2, 4, 1, 2, [0, 1]),
    ],
)
def test_every_stage_of_decode_is_written_to(
    prefill_rank: int, prefill_tp: int, decode_tp: int, decode_stages: int, ranks: list[int]
) -> None:
    assert target_ranks(prefill_rank, prefill_tp, decode_tp, decode_stages, [8], has_state=False) == ranks


@pytest.mark.parametrize(
    ("piece_tokens", "expected"), [(1, 256), (16, 256), (96, 192), (200, 200), (256, 256), (512, 512), (528, 528)]
)
def test_a_stripe_is_whole_pieces(piece_tokens: int, expected: int) -> None:
    assert stripe_tokens(piece_tokens) == expected
