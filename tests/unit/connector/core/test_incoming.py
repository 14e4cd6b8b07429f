"""What several ranks of one prefill engine owe together: refused, divided among stages, and found incomplete."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from pdcluster_connector.core.reception import Compare, Lost, Reception
from pdcluster_protocol.side_channel import ContentSums, Done, RankLayout, Refusal, RegionKind, RegionLayout
from unit.connector.core.test_reception import (
    EXPECTED,
    FIRST,
    GRANT,
    NUM_BYTES,
    OTHER,
    PEER,
    PRINT,
    SECRET,
    SESSION,
    TIMES,
    WELCOME,
    T,
    expecting,
    greet,
    hear,
    hello,
    layout,
    open_,
    reception,
    report_of,
)


def test_an_engine_that_holds_a_layer_differently_is_refused_with_both_values_and_both_names() -> None:
    theirs = layout()
    other = msgspec.structs.replace(theirs.regions[0], page_tokens=24, page_stride=96, page_bytes=96)
    said = msgspec.structs.replace(hello(), layout=msgspec.structs.replace(theirs, regions=(other, theirs.regions[1])))
    reply = hear(reception(is_greeted=False), said)
    assert isinstance(reply, Refusal)
    words = ["engine p", "engine d", "layer a", "--block-size 24 on prefill, 16 on decode", "one must divide the other"]
    assert all(word in reply.reason for word in words)


def test_a_prefill_engine_whose_tp_splits_a_head_is_refused_with_both_names_and_the_cure() -> None:
    """Of a draft model, say: its heads are in the fingerprint, its layers need not be in this rank's stage."""
    made = Reception(WELCOME, msgspec.structs.replace(PRINT, kv_heads=(3, 4)), TIMES, SECRET)
    reply = hear(made, hello(tp_size=4, fingerprint=made.fingerprint))
    assert reply == Refusal(
        "prefill engine p and decode engine d: 3 KV heads cannot be spread over TP 4: choose a --tensor-parallel-size "
        "that divides the KV heads, of a draft model too, or is a multiple of them"
    )


def test_each_stage_of_a_pipeline_owes_its_own_layers() -> None:
    made = expecting(is_greeted=False)
    for stage, peer in enumerate((PEER, OTHER)):
        said = msgspec.structs.replace(hello(), layout=layout(names="ab"[stage], stage=stage, num_stages=2))
        greet(made, said, peer)
        assert hear(made, open_(), peer) == GRANT
    (first, *_) = [list(made.hear(peer, Done(T, FIRST, NUM_BYTES // 2, 1), now=2.0)) for peer in (PEER, OTHER)]
    assert first == []
    assert made.num_waiting == 0


def test_a_layer_that_no_stage_has_is_a_lost_attempt_not_a_hole() -> None:
    made = expecting(is_greeted=False)
    for stage, peer in enumerate((PEER, OTHER)):
        said = msgspec.structs.replace(hello(), layout=layout(names="ac"[stage], stage=stage, num_stages=2))
        greet(made, said, peer)
        assert hear(made, open_(), peer) == GRANT
    list(made.hear(PEER, Done(T, FIRST, NUM_BYTES // 2, 1), now=2.0))
    (lost,) = made.hear(OTHER, Done(T, FIRST, 0, 0), now=2.0)
    assert isinstance(lost, Lost)
    assert "prefill has KV of 4 heads and layers, decode needs 8" in lost.reason


GUESSES = RegionLayout("d", 0, 5999, 9, 32, 32, RegionKind.HEADS, 2, is_draft=True)
SPECULATES = {"draft": "eagle e-1", "draft_heads": (2,)}


def with_draft(rank: RankLayout) -> RankLayout:
    return msgspec.structs.replace(rank, regions=(*rank.regions, GUESSES))


@pytest.mark.parametrize("has_draft", [False, True], ids=["on decode alone", "on both"])
def test_a_draft_models_layers_are_owed_and_compared_where_prefill_has_them(*, has_draft: bool) -> None:
    """3 blocks of 32 bytes more where both speculate."""
    fingerprint = msgspec.structs.replace(PRINT, **SPECULATES)
    welcome = msgspec.structs.replace(WELCOME, layout=with_draft(layout()))
    made, said = Reception(welcome, fingerprint, TIMES, SECRET), hello()
    if has_draft:
        said = msgspec.structs.replace(hello(fingerprint=fingerprint), layout=with_draft(layout()))
    list(made.expect(dataclasses.replace(EXPECTED, wants_sums=True), now=0.0))
    list(made.hear(PEER, said, now=0.0))
    list(made.invited((PEER,), SESSION, now=0.0))
    assert hear(made, open_()) == GRANT
    done = Done(T, FIRST, NUM_BYTES + 96 * has_draft, 2 + has_draft, sums=ContentSums(b"", b""))
    assert list(made.hear(PEER, done, now=1.0)) == [Compare(T, FIRST, has_draft)]


def test_a_decode_rank_waits_for_no_rank_that_its_draft_model_alone_would_bring() -> None:
    """A latent goes from prefill rank 0 of two to decode rank 1 of three; six heads of a draft model from both."""
    latent = RegionLayout("a", 0, 999, 9, 16, 16, RegionKind.LATENT)
    alike = msgspec.structs.replace(PRINT, kv_heads=(1,))
    fingerprint = msgspec.structs.replace(alike, draft="eagle e-1", draft_heads=(6,))
    guesses = msgspec.structs.replace(GUESSES, heads=6)
    theirs = RankLayout(1, 3, (latent, guesses))
    made = Reception(msgspec.structs.replace(WELCOME, layout=theirs), fingerprint, TIMES, SECRET)
    said = msgspec.structs.replace(hello(fingerprint=alike), layout=RankLayout(0, 2, (latent,)))
    list(made.expect(EXPECTED, now=0.0))
    list(made.hear(PEER, said, now=0.0))
    list(made.invited((PEER,), SESSION, now=0.0))
    assert hear(made, open_()) == GRANT
    (ended,) = made.hear(PEER, Done(T, FIRST, 48, 1), now=1.0)
    assert report_of([ended]).is_received
