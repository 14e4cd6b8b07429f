"""Which part of a prompt is complete: known cases; random ones are in ``tests/property/test_link.py``."""

from __future__ import annotations

import pytest

from pdcluster_connector.core.watermark import GroupPair, KvGroup, Prompt, slice_of, wanted_spans

PLAIN = GroupPair(KvGroup(128), KvGroup(128))
STATE = GroupPair(KvGroup(1, is_state=True), KvGroup(1, is_state=True))


@pytest.mark.parametrize(
    ("watermark", "computed", "span"),
    [
        pytest.param(0, 100, (128, 128), id="nothing is complete"),
        pytest.param(128, 200, (128, 128), id="still nothing"),
        pytest.param(128, 299, (128, 256), id="one block"),
        pytest.param(256, 300, (256, 300), id="the prompt's end"),
        pytest.param(256, 130, (256, 256), id="computed again after a preemption"),
        pytest.param(300, 300, (300, 300), id="all was pushed"),
    ],
)
def test_known_spans(watermark: int, computed: int, span: tuple[int, int]) -> None:
    assert Prompt(300, 128, (PLAIN,)).next_span(0, watermark, computed) == span


def test_state_is_complete_when_the_prompt_is() -> None:
    prompt = Prompt(300, 0, (PLAIN, STATE))
    assert prompt.next_span(1, 0, 299) == (0, 0)
    assert prompt.next_span(1, 0, 300) == (0, 1)
    assert prompt.next_span(1, 1, 300) == (1, 1)


def test_units_are_the_smaller_blocks() -> None:
    pair = GroupPair(KvGroup(128), KvGroup(32))
    assert Prompt(300, 32, (pair,)).next_span(0, 32, 100) == (32, 96)
    part = slice_of(pair, (32, 160), [7, 8, 9], list(range(20, 30)))
    assert (part.source_blocks, part.target_blocks) == ((7, 8), (21, 22, 23, 24))


@pytest.mark.parametrize(("prefill", "decode"), [(48, 32), (0, 16)])
def test_blocks_that_do_not_divide_are_refused(prefill: int, decode: int) -> None:
    with pytest.raises(ValueError, match="do not divide"):
        GroupPair(KvGroup(prefill), KvGroup(decode))


def test_state_on_one_engine_only_is_refused() -> None:
    with pytest.raises(ValueError, match="recurrent state on one engine only"):
        GroupPair(KvGroup(1, is_state=True), KvGroup(16))


@pytest.mark.parametrize(("tokens", "cached"), [(300, 130), (300, 384), (128, 128)])
def test_a_cached_part_that_leaves_nothing_or_half_a_block_is_refused(tokens: int, cached: int) -> None:
    with pytest.raises(ValueError, match="cached tokens"):
        Prompt(tokens, cached, (PLAIN,))


@pytest.mark.parametrize(
    ("first", "blocks", "spans"),
    [
        pytest.param(0, [1, 2, 3], ((0, 40),), id="one run"),
        pytest.param(16, [1, 2, 3], ((16, 40),), id="after the cached part"),
        pytest.param(20, [1, 2, 3], ((20, 40),), id="from within a block on"),
        pytest.param(20, [1, 0, 3], ((32, 40),), id="from within a block that decode does not want"),
        pytest.param(0, [0, 2, 3], ((16, 40),), id="out of the window at first"),
        pytest.param(0, [1, 0, 3], ((0, 16), (32, 40)), id="a hole"),
        pytest.param(0, [0, 0, 0], (), id="nothing"),
    ],
)
def test_positions_that_decode_wants(first: int, blocks: list[int], spans: tuple[tuple[int, int], ...]) -> None:
    assert wanted_spans(KvGroup(16), first, 40, blocks) == spans


def test_state_is_always_wanted() -> None:
    assert wanted_spans(KvGroup(1, is_state=True), 16, 40, [5]) == ((0, 1),)


@pytest.mark.parametrize(
    ("group", "tokens", "held"),
    [
        pytest.param(KvGroup(16), 33, [1, 2, 3], id="lookahead blocks of a drafter are not of the prompt"),
        pytest.param(KvGroup(1, is_state=True), 33, [1], id="mode none: one state, in the first block"),
        pytest.param(KvGroup(1, is_state=True, state_every=16), 16, [1], id="mode align: the state of 16 tokens"),
        pytest.param(KvGroup(1, is_state=True, state_every=16), 17, [2], id="mode align: one token later"),
    ],
)
def test_the_blocks_that_hold_a_prompt(group: KvGroup, tokens: int, held: list[int]) -> None:
    assert group.held_blocks(tokens, [1, 2, 3, 4]) == held


@pytest.mark.parametrize("num_guesses", [0, 1, 3])
@pytest.mark.parametrize(("state_every", "num_tokens", "index"), [(0, 1, 0), (0, 700, 0), (128, 128, 0), (128, 700, 5)])
def test_blocks_for_guesses_are_not_the_state(num_guesses: int, state_every: int, num_tokens: int, index: int) -> None:
    """vLLM 0.32's ``MambaManager`` has a block for each speculative token behind that of the state."""
    blocks = [*range(10, 11 + index), *range(90, 90 + num_guesses)]
    group = KvGroup(1, is_state=True, state_every=state_every)
    assert group.held_blocks(num_tokens, blocks) == [10 + index]
