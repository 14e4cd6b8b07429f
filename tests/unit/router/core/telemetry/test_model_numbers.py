"""What counts of an answer in the numbers of its model."""

from __future__ import annotations

import pytest

from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.core.telemetry.histogram import Histogram
from pdcluster_router.core.telemetry.model_numbers import ModelNumbers

USAGE = (
    b'{"usage":{"prompt_tokens":50,"total_tokens":61,"completion_tokens":11,'
    b'"prompt_tokens_details":{"cached_tokens":48}}}'
)


def line(prompt: int | None = None, cached: int | None = None) -> RequestTrace:
    return RequestTrace(transfer_id=TransferId("t"), received_at=0.0, prompt_tokens=prompt, cached_tokens=cached)


def said(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), histogram.total


def tokens(numbers: ModelNumbers) -> list[tuple[int, float]]:
    """Of prompt, cache and answer: how many answers, and their tokens."""
    return [said(one) for one in (numbers.prompt_tokens, numbers.cached_tokens, numbers.answer_tokens)]


@pytest.mark.parametrize(
    ("prompt", "end", "counted"),
    [
        pytest.param(line(42, 16), USAGE, [(1, 42), (1, 16), (1, 11)], id="the reservation goes before"),
        pytest.param(line(), USAGE, [(1, 50), (1, 48), (1, 11)], id="no reservation"),
        pytest.param(None, USAGE, [(1, 50), (1, 48), (1, 11)], id="no line"),
        pytest.param(line(42, 0), b"data: [DONE]", [(1, 42), (1, 0), (0, 0)], id="no usage"),
        pytest.param(line(), b"", [(0, 0), (0, 0), (0, 0)], id="nothing"),
        pytest.param(line(), b'{"usage":{"prompt_tokens":5}}', [(1, 5), (0, 0), (0, 0)], id="no cache told"),
        pytest.param(
            line(),
            b'{"usage":{"input_tokens":3,"output_tokens":2,"cache_read_input_tokens":4}}',
            [(1, 7), (1, 4), (1, 2)],
            id="messages",
        ),
    ],
)
def test_tokens_are_those_of_the_reservation_and_of_usage(
    prompt: RequestTrace | None, end: bytes, counted: list[tuple[int, float]]
) -> None:
    numbers = ModelNumbers()
    numbers.answered(prompt, end)
    assert tokens(numbers) == counted


def test_a_token_after_the_first_one_takes_the_time_of_the_stream_by_their_number() -> None:
    numbers = ModelNumbers()
    numbers.answered(line(42, 16), USAGE, 0.5)
    assert said(numbers.token_s) == (1, 0.05)
    assert numbers.token_s.buckets()[4] == ("0.05", 1)


@pytest.mark.parametrize("num_answer", [0, 1])
def test_an_answer_of_one_token_has_no_time_of_a_token(num_answer: int) -> None:
    numbers = ModelNumbers()
    numbers.answered(line(), b'{"usage":{"completion_tokens":%d}}' % num_answer, 0.5)
    assert said(numbers.token_s) == (0, 0)
    assert said(numbers.answer_tokens) == (1, num_answer)


def test_a_stream_without_usage_and_an_answer_that_is_no_stream_have_no_time_of_a_token() -> None:
    numbers = ModelNumbers()
    numbers.answered(line(42, 16), b"data: [DONE]", 0.5)
    numbers.answered(line(42, 16), USAGE, None)
    assert said(numbers.token_s) == (0, 0)
