"""Laws of the router's core, over anything that may come."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from fakes.reservations import reservation_of
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams, parse_reservation, to_wire
from pdcluster_router.core.apis.openai_errors import bad_request, from_engine, parse_error
from pdcluster_router.core.apis.rewrite import BadBody, parse_body
from pdcluster_router.core.apis.sse import error_event, error_of, first_event_end
from pdcluster_router.core.engines.load import AnswerLength
from pdcluster_router.core.engines.placement import left_of

PARAMS = DecodeParams(metaserver="http://r", transfer_id=TransferId("t"), deadline_ms=1)
RESERVATION = parse_reservation(reservation_of(to_wire(PARAMS)))
ALWAYS = {"stream": False, "max_tokens": 1, "min_tokens": 1, "n": 1}
FOR_PREFILL = ALWAYS | {
    "stream_options": None, "max_completion_tokens": 1, "echo": False, "logprobs": None, "top_logprobs": 0,
    "logprob_token_ids": None, "best_of": None, "use_beam_search": False, "prompt_logprobs": None,
    "ec_transfer_params": None,
}  # fmt: skip
"""What prefill is told of these, whatever the client says; unless always, only if it says something."""
OURS = {"kv_transfer_params", *FOR_PREFILL}

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(["prompt", "messages", *sorted(OURS)]) | st.text()
BODIES = st.dictionaries(KEYS, JSON, max_size=8)


@given(BODIES, st.booleans())
def test_decode_loses_nothing_of_the_clients_body_and_gains_only_our_parameters(
    fields: dict[str, Any], is_ascii: bool
) -> None:
    raw = json.dumps(fields, ensure_ascii=is_ascii).encode()
    body = json.loads(b"".join(parse_body(raw).for_decode(PARAMS)))
    assert body.pop("kv_transfer_params") == to_wire(PARAMS)
    if "ec_transfer_params" in fields:
        assert body.pop("ec_transfer_params") is None
    assert body == {
        key: value for key, value in fields.items() if key not in {"kv_transfer_params", "ec_transfer_params"}
    }


@given(BODIES)
def test_a_body_without_parameters_reaches_decode_as_the_very_same_bytes(fields: dict[str, Any]) -> None:
    raw = json.dumps({key: value for key, value in fields.items() if not key.endswith("_transfer_params")}).encode()
    assert b"".join(parse_body(raw).for_decode(None)) == raw


@given(BODIES, st.text(min_size=1), st.text(), st.sampled_from(["model", "\\u006dodel"]))
def test_a_body_with_an_alias_differs_for_engines_in_the_models_name_alone(
    fields: dict[str, Any], alias: str, model: str, key: str
) -> None:
    asked = {name: value for name, value in fields.items() if name != "model"}
    raw = json.dumps({**asked, "MODEL": alias}).replace('"MODEL":', f'"{key}":').encode()
    assume(raw.count(f'"{key}":'.encode()) == 1)
    body = parse_body(raw)
    named = body.for_model(msgspec.json.encode(model))
    assert (named.model, named.alias_of, body.alias_of) == (alias, model, "")
    assert named.renamed().startswith(raw[:-1])
    assert json.loads(named.renamed()) == {**asked, "model": model}
    for before, after in (
        (body.for_decode(PARAMS), named.for_decode(PARAMS)),
        (body.for_prefill(RESERVATION), named.for_prefill(RESERVATION)),
    ):
        assert after[0] == before[0]
        assert json.loads(b"".join(after)) == {**json.loads(b"".join(before)), "model": model}


@given(BODIES)
def test_prefill_gets_the_same_prompt_and_always_one_token(fields: dict[str, Any]) -> None:
    body = json.loads(b"".join(parse_body(json.dumps(fields).encode()).for_prefill(RESERVATION)))
    told = {key: value for key, value in FOR_PREFILL.items() if key in ALWAYS or key in fields}
    assert {key: body[key] for key in FOR_PREFILL if key in body} == told
    assert parse_reservation(body["kv_transfer_params"]) == RESERVATION
    rest = {key: value for key, value in fields.items() if key not in OURS}
    assert {key: value for key, value in body.items() if key not in OURS} == rest


IDS = st.lists(st.integers(0, 200_000), max_size=4)
PROMPTS = st.text() | IDS | st.lists(st.text() | IDS, max_size=3)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" \n\t,\r ", ":")])


@given(PROMPTS, SEPARATORS, st.sampled_from(["", " ", "\n \t"]))
def test_a_prompt_is_one_exactly_if_python_finds_one_in_it(
    prompt: Any, separators: tuple[str, str], blank: str
) -> None:
    text = json.dumps(prompt, separators=separators)
    if text.startswith("["):
        text = f"[{blank}{text[1:-1]}{blank}]"
    is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) or len(prompt) == 1
    assert parse_body(f'{{"prompt":{blank}{text}{blank}}}'.encode()).needs_local_prefill is not is_one


@given(st.text('"\\{}[]:,n12u06e \n\ud800é', max_size=12))
def test_a_scan_sees_what_pythons_json_sees(middle: str) -> None:
    """With it vLLM reads bodies. What either of them refuses reaches no transfer."""
    raw = f'{{"a":"{middle}","n":1}}'.encode("utf-8", "surrogatepass")
    try:
        fields = json.loads(raw)
        body = parse_body(raw)
    except (ValueError, BadBody):
        return
    assert body.needs_local_prefill == (fields["n"] != 1)
    assert list(json.loads(b"".join(body.for_decode(PARAMS)))) == [*fields, "kv_transfer_params"]


@given(BODIES)
def test_questions_about_a_body_always_have_an_answer(fields: dict[str, Any]) -> None:
    body = parse_body(json.dumps(fields).encode())
    assert isinstance(body.needs_local_prefill, bool)
    assert isinstance(body.is_stream, bool)
    assert body.estimated_prompt_tokens > 0
    assert body.max_answer_tokens is None or body.max_answer_tokens > 0


@given(st.binary(max_size=60))
def test_any_bytes_are_a_body_or_a_bad_one(raw: bytes) -> None:
    with contextlib.suppress(BadBody):
        assert parse_body(raw).num_bytes == len(raw)


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.booleans()), max_size=300),
    st.none() | st.integers(1, 1 << 70),
)
def test_no_limit_and_no_answer_makes_a_request_count_for_more_than_a_long_answer(
    answers: list[tuple[int, bool]], limit: int | None
) -> None:
    length = AnswerLength()
    for num_bytes, is_stream in answers:
        length.saw(num_bytes, is_stream=is_stream)
    assert 1 <= length.expected(limit) <= 8192
    assert limit is None or length.expected(limit) <= limit


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=3), st.sets(st.integers(0, 5)))
def test_an_excluded_engine_is_never_left_and_somebody_is_if_any_tier_has_one(
    tiers: list[list[int]], excluded: set[int]
) -> None:
    left = left_of(tiers, excluded)
    assert not excluded & set(left)
    assert bool(left) == any(engine not in excluded for tier in tiers for engine in tier)


@given(st.lists(st.binary(min_size=1, max_size=20).filter(lambda b: b"\n" not in b and b"\r" not in b), min_size=1))
def test_the_first_event_is_found_wherever_the_stream_is_cut(lines: list[bytes]) -> None:
    stream = b"".join(b"data: " + line + b"\n\n" for line in lines)
    end = len(lines[0]) + len(b"data: \n\n")
    for cut in range(len(stream) + 1):
        assert first_event_end(stream[:cut]) == (end if cut >= end else -1)


@given(st.binary(max_size=80))
def test_any_event_is_an_error_or_not(event: bytes) -> None:
    error = error_of(event)
    assert error is None or 400 <= error.status <= 599


@given(st.text())
def test_every_error_of_ours_survives_as_an_event(message: str) -> None:
    event = error_event(bad_request(message))
    assert first_event_end(event) == len(event)
    assert error_of(event) is not None


@given(st.integers(400, 599), st.binary(max_size=80))
def test_an_engines_error_always_ends_up_in_openais_shape(status: int, body: bytes) -> None:
    assert parse_error(from_engine(status, body)) is not None
