"""Each block leaves exactly once, as soon as it is complete."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_connector.core.watermark import Prompt, next_span


def spans(prompt: Prompt, computed: list[int]) -> list[range]:
    watermark, result = 0, []
    for tokens in computed:
        span = next_span(prompt, watermark, tokens)
        watermark = span.stop
        result.append(span)
    return result


@given(
    st.integers(1, 500),
    st.integers(1, 64),
    st.lists(st.integers(0, 500), max_size=10),
    st.data(),
)
def test_every_missing_block_leaves_exactly_once_whatever_the_chunks_and_preemptions(
    num_tokens: int, block_size: int, computed: list[int], data: st.DataObject
) -> None:
    cached = data.draw(st.integers(0, (num_tokens - 1) // block_size)) * block_size
    prompt = Prompt(num_tokens, cached, block_size)
    sent = [block for span in spans(prompt, [*computed, num_tokens]) for block in span]
    assert sent == list(range(cached // block_size, -(-num_tokens // block_size)))


@given(st.integers(1, 500), st.integers(1, 64), st.integers(0, 499))
def test_no_block_leaves_before_its_last_token_is_computed(num_tokens: int, block_size: int, computed: int) -> None:
    span = next_span(Prompt(num_tokens, 0, block_size), 0, computed)
    assert min(span.stop * block_size, num_tokens) <= computed or not span


@pytest.mark.parametrize(
    ("prompt", "computed", "expected"),
    [
        pytest.param(Prompt(300, 128, 128), [100, 200, 300], [(1, 1), (1, 1), (1, 3)], id="the docstring's example"),
        pytest.param(Prompt(256, 0, 128), [128, 256], [(0, 1), (1, 2)], id="ends on a block border"),
        pytest.param(Prompt(1, 0, 16), [1], [(0, 1)], id="one token"),
        pytest.param(Prompt(64, 0, 16), [48, 16, 64], [(0, 3), (3, 3), (3, 4)], id="preempted and computed again"),
    ],
)
def test_known_spans(prompt: Prompt, computed: list[int], expected: list[tuple[int, int]]) -> None:
    assert spans(prompt, computed) == [range(a, b) for a, b in expected]


@pytest.mark.parametrize(("num_tokens", "cached", "block_size"), [(10, 3, 4), (10, 12, 4), (8, 8, 4), (8, 0, 0)])
def test_a_prompt_that_cannot_be_is_refused(num_tokens: int, cached: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="cached tokens"):
        Prompt(num_tokens, cached, block_size)
