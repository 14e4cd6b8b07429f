"""Laws of an answer's facts: how it is torn changes none of them, the median is near the true one, little is kept."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from statistics import median_low

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_router.core.telemetry.answer_facts import (
    END_BYTES,
    LEAST_GAP_S,
    STEP,
    AnswerFacts,
    StreamFacts,
    TokenCounts,
    token_counts_in,
)

TEXTS = st.lists(st.text(max_size=300), max_size=12)
COUNTS = st.integers(0, 1 << 40)
GAPS = st.lists(st.floats(LEAST_GAP_S, 900.0), min_size=1, max_size=200)


def torn(whole: bytes, data: st.DataObject) -> list[bytes]:
    """The same bytes in any pieces, none of them empty."""
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=40)))
    pieces = [whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    return [piece for piece in pieces if piece]


@given(TEXTS, COUNTS, COUNTS, COUNTS, st.data())
def test_a_stream_in_any_pieces_says_the_same(
    texts: list[str], prompt: int, output: int, cached: int, data: st.DataObject
) -> None:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    events = [json.dumps({"choices": [{"text": text}]}) for text in texts] + [json.dumps({"usage": usage})]
    whole = "".join(f"data: {event}\n\n" for event in events).encode() + b"data: [DONE]\n\n"
    facts = StreamFacts()
    for number, piece in enumerate(torn(whole, data)):
        facts.add(piece, float(number))
    assert facts.num_bytes == len(whole)
    assert facts.num_events == len(events)
    assert facts.token_counts == TokenCounts(prompt, output, cached)


@given(st.text(max_size=3000), COUNTS, COUNTS, st.data())
def test_a_plain_answer_in_any_pieces_says_the_same(text: str, prompt: int, output: int, data: st.DataObject) -> None:
    whole = json.dumps({"text": text, "usage": {"input_tokens": prompt, "output_tokens": output}}).encode()
    facts = AnswerFacts()
    for piece in torn(whole, data):
        facts.add(piece, 1.0)
    assert facts.num_bytes == len(whole)
    assert facts.token_counts == TokenCounts(prompt, output)


@given(GAPS)
def test_the_median_gap_is_within_half_a_step_and_the_longest_is_exact(gaps: list[float]) -> None:
    facts, times = StreamFacts(), [0.0]
    for gap_s in gaps:
        times.append(times[-1] + gap_s)
    for now in times:
        facts.add(b"x", now)
    seen = [after - before for before, after in pairwise(times)]
    assert facts.max_gap_s == max(seen)
    assert facts.p50_gap_s is not None
    low = median_low(seen)
    assert low / STEP**0.501 <= facts.p50_gap_s <= max(low, LEAST_GAP_S) * STEP**0.501


@given(st.binary(min_size=1, max_size=64), st.lists(st.integers(1, 20_000), max_size=30))
def test_any_bytes_are_taken_and_little_of_them_is_kept(text: bytes, lengths: list[int]) -> None:
    for facts in (AnswerFacts(), StreamFacts()):
        for number, length in enumerate(lengths):
            facts.add((text * length)[:length], float(number))
            assert sys.getsizeof(facts._end) <= 8 * END_BYTES
        assert facts.num_bytes == sum(lengths)
        token_counts_in(bytes(facts._end))
