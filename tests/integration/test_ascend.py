"""Two real ranks, with Mooncake between them, hold KV in the tensors that vllm-ascend 0.23.0.post1 makes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest

from ascend.ranks import facts_of, memory_of_rank, rank_of, token_memory_of, views_of
from integration.ranks import LIFE, SECRET, STEP_S
from pdcluster_connector.assembly import DecodeRank, PrefillRank, make_decode_rank, make_prefill_rank
from pdcluster_connector.core.ranges import GroupSlice
from pdcluster_connector.ending import end_parts
from pdcluster_connector.settings import parse_settings
from pdcluster_connector.steps import DecodeStep, Expect, PrefillStep, PushSlice, PushTarget
from pdcluster_connector.vllm.facts import _view_of
from pdcluster_protocol.ids import Attempt, EngineId, RequestId, TransferId
from pdcluster_protocol.labels import Role

SETTINGS = parse_settings(
    {"side_channel_port": 0, "staging_bytes": 8 << 20, "quarantine_s": 0.5, "hold_s": 0.5, "lease_s": 20}
    | {"handshake_timeout_s": 20, "reshard_timeout_s": 60}
)
OURS, THEIRS = (1, 4, 2, 7), (9, 3, 5, 6)
"""A prompt's blocks on prefill and on decode."""
NUM_TOKENS = 128 * len(OURS)
NAME, TRANSFER, ATTEMPT = RequestId("r"), TransferId("r"), Attempt(1)
DEADLINE_MS = int(1000 * STEP_S)


def forward(prefill: PrefillRank, decode: Sequence[DecodeRank], layer_names: list[str]) -> None:
    """Decode has reserved its blocks, and one step of prefill computes the whole prompt."""
    for rank in decode:
        rank.worker.begin_step(DecodeStep(expects=(Expect(NAME, TRANSFER, DEADLINE_MS, (((0, NUM_TOKENS),),)),)))
    addresses = tuple(rank.address for rank in decode)
    target = PushTarget(EngineId("decode"), len(decode), addresses, DEADLINE_MS, (128,), (128,))
    token = SECRET.mint(TRANSFER, ATTEMPT, DEADLINE_MS)
    part = (GroupSlice(0, NUM_TOKENS, OURS, THEIRS),)
    push = PushSlice(NAME, TRANSFER, ATTEMPT, token, target, part, num_prompt_tokens=NUM_TOKENS, is_last=True)
    prefill.worker.begin_step(PrefillStep(LIFE, (push,)))
    for name in layer_names:
        prefill.worker.layer_saved(name)
    prefill.worker.end_step()


def wait_for_the_end(decode: DecodeRank) -> bool:
    """Whether the prompt was received."""
    until = time.monotonic() + STEP_S
    while NAME not in (receipts := decode.worker.receipts()).ended:
        assert time.monotonic() < until
        time.sleep(0.001)
    return NAME not in receipts.failed


@pytest.mark.parametrize("case", ["gqa", "gqa, one head on a rank", "gqa, wider keys than values", "mla", "sfa"])
def test_a_prompt_arrives_in_decodes_blocks(case: str) -> None:
    (ours, source, written), (theirs, target, _) = rank_of(case, 0, 1, content=7), rank_of(case, 0, 1, content=None)
    decode = make_decode_rank(facts_of(Role.DECODE, target, SETTINGS), memory_of_rank(theirs, target))
    prefill = make_prefill_rank(facts_of(Role.PREFILL, source, SETTINGS), memory_of_rank(ours, source))
    try:
        forward(prefill, [decode], [layer.name for layer in source.layers])
        assert wait_for_the_end(decode)
    finally:
        end_parts([prefill, decode])
    for layer, contents in zip(target.layers, written, strict=True):
        for view, content in zip(views_of(layer), contents, strict=True):
            held = _view_of(view).numpy()
            assert np.array_equal(held[list(THEIRS)], content[list(OURS)])
            assert not held[[0, 1, 2, 4, 7, 8, 10, 11]].any()


def test_each_decode_rank_of_two_gets_its_heads_of_a_prefill_engine_of_one() -> None:
    """Tokens have all heads side by side, so that the resharder cuts them apart."""
    ours, source, written = rank_of("gqa", 0, 1, content=7)
    theirs = [rank_of("gqa, half of the heads", rank, 2, content=None) for rank in range(2)]
    with ExitStack() as stack:
        decode = []
        for layout, case, _ in theirs:
            decode.append(make_decode_rank(facts_of(Role.DECODE, case, SETTINGS, 2), memory_of_rank(layout, case)))
            stack.callback(end_parts, [decode[-1]])
        memory = memory_of_rank(ours, source)
        prefill = make_prefill_rank(facts_of(Role.PREFILL, source, SETTINGS), memory, token_memory_of(memory))
        stack.callback(end_parts, [prefill])
        forward(prefill, decode, [layer.name for layer in source.layers])
        assert all(map(wait_for_the_end, decode))
    for rank, (_, case, _) in enumerate(theirs):
        for layer, contents in zip(case.layers, written, strict=True):
            for view, content in zip(views_of(layer), contents, strict=True):
                heads = slice(2 * rank, 2 * rank + 2)
                assert np.array_equal(_view_of(view).numpy()[list(THEIRS)], content[list(OURS)][:, heads])
