"""What several ranks of one prefill engine owe together: refused, divided among stages, and found incomplete."""

from __future__ import annotations

import msgspec

from pdcluster_connector.core.reception import Lost, Reception
from pdcluster_protocol.side_channel import Done, Refusal
from unit.connector.core.test_reception import (
    FIRST,
    GRANT,
    NUM_BYTES,
    OTHER,
    PEER,
    PRINT,
    SECRET,
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
