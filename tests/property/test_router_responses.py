"""Laws of OpenAI's Responses API in the router's core, over anything that may come."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fakes.reservations import reservation_of
from fakes.responses import ResponsesWords
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams, parse_reservation, to_wire
from pdcluster_router.core.apis.responses import parse_responses, unfinished
from pdcluster_router.core.apis.responses_stream import ResponsesWatch, first_event
from pdcluster_router.core.apis.rewrite import BadBody

PARAMS = DecodeParams(metaserver="http://r", transfer_id=TransferId("t"), deadline_ms=1)
RESERVATION = parse_reservation(reservation_of(to_wire(PARAMS)))
SIMPLE = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
JSON = st.recursive(
    SIMPLE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
KEYS = st.sampled_from(["input", "stream", "max_output_tokens", "store", "n", "prompt", "stop", "tools"]) | st.text()
BODIES = st.dictionaries(KEYS, JSON, max_size=6)
OURS = {"kv_transfer_params", "ec_transfer_params", "stream", "max_output_tokens", "store"}
TEXTS = st.lists(st.text(min_size=1), min_size=1, max_size=4)


@given(BODIES)
def test_prefill_gets_the_same_prompt_and_always_one_token_and_nothing_is_stored(fields: dict[str, Any]) -> None:
    with contextlib.suppress(BadBody):
        body = json.loads(b"".join(parse_responses(json.dumps(fields).encode()).for_prefill(RESERVATION)))
        assert (body["stream"], body["max_output_tokens"], body["store"]) == (False, 1, False)
        assert parse_reservation(body["kv_transfer_params"]) == msgspec.structs.replace(RESERVATION, wants_whole=True)
        assert {key: value for key, value in body.items() if key not in OURS} == {
            key: value for key, value in fields.items() if key not in OURS
        }


@given(st.binary(max_size=60))
def test_any_bytes_are_a_body_or_a_bad_one(raw: bytes) -> None:
    with contextlib.suppress(BadBody):
        assert parse_responses(raw).num_bytes == len(raw)


@given(JSON, st.booleans())
def test_an_answer_is_whole_if_and_only_if_its_own_parameters_say_so(value: object, is_whole: bool) -> None:
    said = {"output": value, "kv_transfer_params": {"pdcluster_is_whole": is_whole}}
    assert (unfinished(json.dumps(said).encode()) == "") is is_whole
    assert unfinished(json.dumps({"output": said, "metadata": said}).encode())


@given(st.binary(max_size=60))
def test_no_bytes_break_the_look_at_an_answer(raw: bytes) -> None:
    assert isinstance(unfinished(raw), str)
    assert first_event(raw)[1] <= len(raw)
    ResponsesWatch().feed(raw)


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    ends = [*sorted(at % (len(stream) + 1) for at in cuts), len(stream)]
    return [stream[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 1 << 16), max_size=8), st.binary(max_size=8))
def test_what_goes_to_the_client_is_the_stream_or_lacks_its_last_event(
    texts: list[str], is_whole: bool, cuts: list[int], behind: bytes
) -> None:
    words = ResponsesWords({"kv_transfer_params": {"wants_whole": True}}, texts, "", None)
    last = words.last("response.completed", "completed", is_whole=is_whole)[0]
    begun = b"".join(words.events()[:-1])
    watch = ResponsesWatch()
    passed = b"".join(map(watch.feed, cut(begun + last + behind, cuts)))
    if is_whole:
        assert passed == begun + last + behind
        assert watch.problem_at_end() == ""
    else:
        assert passed.startswith(begun)
        assert b"\ndata:" not in passed[len(begun) :]
        assert watch.problem_at_end()
