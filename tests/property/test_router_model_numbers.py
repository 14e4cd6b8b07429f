"""Laws of a model's numbers: no answer is lost or counted twice, and the sums of processes are those of one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.core.processes.sums import summed
from pdcluster_router.core.telemetry.model_numbers import ModelNumbers
from pdcluster_router.telemetry.metrics import Metrics

NUMBERS = st.none() | st.integers(0, 1 << 21)
ANSWERS = st.lists(
    st.tuples(st.sampled_from(["", "llama", "qwen"]), NUMBERS, NUMBERS, NUMBERS, st.none() | st.integers(0, 1 << 12)),
    max_size=20,
)
"""Model, tokens of prompt, cache and answer, and seconds of the stream. Whole, so that sums are exact in any order."""
Answer = tuple[str, int | None, int | None, int | None, int | None]


def count(numbers: ModelNumbers, answer: Answer) -> None:
    _, prompt, cached, num_answer, stream_s = answer
    known = None if prompt is None else cached
    trace = RequestTrace(transfer_id=TransferId("t"), received_at=0.0, prompt_tokens=prompt, cached_tokens=known)
    usage = b"" if num_answer is None else b'{"usage":{"completion_tokens":%d}}' % num_answer
    numbers.answered(trace, usage, None if stream_s is None else float(stream_s))


def text_of(answers: list[Answer]) -> str:
    metrics = Metrics()
    for answer in answers:
        count(metrics.models.of(answer[0]), answer)
    return metrics.render().decode()


def samples(text: str) -> dict[tuple[str, str, str], float]:
    return {
        (one.name, one.labels["model"], one.labels.get("le", "")): one.value
        for family in text_string_to_metric_families(text)
        if "_model_" in family.name
        for one in family.samples
    }


@given(ANSWERS)
def test_each_answer_counts_once_in_what_it_tells(answers: list[Answer]) -> None:
    numbers = ModelNumbers()
    for answer in answers:
        count(numbers, answer)
    prompts = [(prompt, cached) for _, prompt, cached, _, _ in answers if prompt is not None]
    told = [num for _, _, _, num, _ in answers if num is not None]
    expected = (
        (numbers.prompt_tokens, [prompt for prompt, _ in prompts]),
        (numbers.cached_tokens, [cached for _, cached in prompts if cached is not None]),
        (numbers.answer_tokens, told),
    )
    for histogram, tokens in expected:
        assert (sum(histogram.counts), histogram.total) == (len(tokens), sum(tokens))
        for bound, number in zip(histogram.bounds, histogram.buckets(), strict=False):
            assert number == (str(bound), sum(one <= bound for one in tokens))
    streams = [seconds for *_, num, seconds in answers if seconds is not None and num is not None and num > 1]
    assert sum(numbers.token_s.counts) == len(streams)


@given(ANSWERS, st.lists(st.integers(0, 20), max_size=3), st.integers(0, 3))
def test_processes_add_up_to_what_one_would_have_counted(answers: list[Answer], cuts: list[int], ended: int) -> None:
    places = [0, *sorted(min(cut, len(answers)) for cut in cuts), len(answers)]
    texts = [text_of(answers[begin:end]) for begin, end in pairwise(places)]
    alone, together = samples(text_of(answers)), samples(summed(texts[ended:], texts[:ended]))
    assert together.keys() == alone.keys()
    for key, value in alone.items():
        assert abs(together[key] - value) <= 1e-9 * max(1.0, abs(value))
