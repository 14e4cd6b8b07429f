"""The two bodies made of the client's one."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from fakes.reservations import reservation_of
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams, parse_decode_params, parse_reservation, to_wire
from pdcluster_router.core.apis.rewrite import PREFILLED_APART, BadBody, parse_body

PARAMS = DecodeParams(metaserver="http://r/v1/metaserver", transfer_id=TransferId("t"), deadline_ms=9)
RESERVATION = parse_reservation(reservation_of(to_wire(PARAMS)))


def decode_body(fields: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(b"".join(parse_body(json.dumps(fields).encode()).for_decode(PARAMS)))
    return body


def prefill_body(fields: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(b"".join(parse_body(json.dumps(fields).encode()).for_prefill(RESERVATION)))
    return body


def test_decode_gets_everything_that_the_client_sent_and_our_parameters() -> None:
    fields = {"prompt": "a", "stream": True, "logprobs": 2, "x": [1.5, None, "é"]}
    body = decode_body(fields)
    assert parse_decode_params(body.pop("kv_transfer_params")) == PARAMS
    assert body == fields


def test_what_the_client_sent_reaches_decode_byte_for_byte() -> None:
    raw = b'{ "seed":1180591620717411303424 ,"b" : 1.10,\n"a":"\\u00e9\xc3\xa9", "max_tokens": 1E1 }'
    assert b"".join(parse_body(raw + b" \n").for_decode(None)) == raw
    assert b"".join(parse_body(raw).for_decode(PARAMS)).startswith(raw[:-1] + b',"kv_transfer_params":{')


@pytest.mark.parametrize("empty", [b"{}", b" {\n\t} ", b"\xef\xbb\xbf{ }"])
def test_an_empty_object_gets_our_parameters_too(empty: bytes) -> None:
    assert list(json.loads(b"".join(parse_body(empty).for_decode(PARAMS)))) == ["kv_transfer_params"]


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_byte_order_mark_is_not_passed_on(kind: type[bytes | bytearray]) -> None:
    body = parse_body(kind(b'\xef\xbb\xbf{"prompt":"a"}'))
    assert b"".join(body.for_decode(None)) == b'{"prompt":"a"}'
    assert body.num_bytes == 17


SPELLINGS = ["kv_transfer_params", "\\u006bv_transfer_params", "kv\\u005Ftransfer\\u005fparams"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_parameters_that_the_client_sent_never_win(spelling: str) -> None:
    theirs = f'"{spelling}": {{"do_remote_decode": true, "remote_host": "evil"}}'
    for raw in (f'{{{theirs}, "prompt": "a"}}', f'{{"prompt": "a", {theirs}, {theirs}}}'):
        body = parse_body(raw.encode())
        assert json.loads(b"".join(body.for_decode(PARAMS)))["kv_transfer_params"] == to_wire(PARAMS)
        assert (
            parse_reservation(json.loads(b"".join(body.for_prefill(RESERVATION)))["kv_transfer_params"]) == RESERVATION
        )
        assert json.loads(b"".join(body.for_decode(None)))["kv_transfer_params"] is None


@pytest.mark.parametrize("spelling", ["ec_transfer_params", "\\u0065c_transfer_params"])
def test_parameters_of_another_transfer_reach_no_engine(spelling: str) -> None:
    body = parse_body(f'{{"prompt": "a", "{spelling}": {{"a": 1}}}}'.encode())
    for parts in (body.for_decode(PARAMS), body.for_decode(None), body.for_prefill(RESERVATION)):
        assert json.loads(b"".join(parts))["ec_transfer_params"] is None


@pytest.mark.parametrize("spelling", [*SPELLINGS, "ec_transfer_params", "ec\\u005ftransfer_params"])
def test_parameters_that_hide_in_vllms_own_arguments_are_refused(spelling: str) -> None:
    for value in ('"boo"', "{}", "null", '[["a"]]'):
        with pytest.raises(BadBody, match="only this router writes it, leave it out"):
            parse_body(f'{{"prompt": "a", "vllm_xargs": {{"x": 1, "{spelling}": {value}}}}}'.encode())


@pytest.mark.parametrize("xargs", ["{}", '{"x": 1}', "null", '{"x": {"kv_transfer_params": 1}}', '{"x": [1.5, "a"]}'])
def test_other_arguments_of_vllms_own_pass(xargs: str) -> None:
    raw = f'{{"prompt": "a", "vllm_xargs": {xargs}}}'.encode()
    assert b"".join(parse_body(raw).for_decode(None)) == raw


def test_prefill_makes_one_token_and_does_not_stream() -> None:
    tools = [{"type": "function"}]
    fields = {"messages": [], "stream": True, "max_tokens": 9, "tools": tools}
    body = prefill_body(fields)
    assert parse_reservation(body.pop("kv_transfer_params")) == RESERVATION
    assert body == {"messages": [], "stream": False, "max_tokens": 1, "min_tokens": 1, "n": 1, "tools": tools}


def test_prefill_is_not_asked_for_what_only_the_answer_needs() -> None:
    asked = {
        "stream_options": {"include_usage": True}, "logprobs": 3, "top_logprobs": 2, "logprob_token_ids": [1],
        "max_completion_tokens": 7, "best_of": 2, "use_beam_search": True, "echo": True, "prompt_logprobs": 1, "n": 5,
    }  # fmt: skip
    neutral = {
        "stream_options": None, "logprobs": None, "top_logprobs": 0, "logprob_token_ids": None,
        "max_completion_tokens": 1, "best_of": None, "use_beam_search": False, "echo": False, "prompt_logprobs": None,
        "n": 1,
    }  # fmt: skip
    body = prefill_body({"prompt": "a", **asked})
    assert {key: body[key] for key in neutral} == neutral
    assert not set(prefill_body({"prompt": "a"})) & (set(neutral) - {"n"})


@pytest.mark.parametrize("xargs", ["7", "true", '"kv_transfer_params"', '["kv_transfer_params"]'])
def test_arguments_that_vllm_does_not_take_are_refused_without_a_second_scan(xargs: str) -> None:
    with pytest.raises(BadBody, match=r"Expected `object \| null`, got `\w+` - at `\$.vllm_xargs`"):
        parse_body(f'{{"prompt": "a", "vllm_xargs": {xargs}}}'.encode())


def test_the_last_of_several_arguments_counts() -> None:
    theirs = '{"kv_transfer_params": 1}'
    assert parse_body(f'{{"vllm_xargs": {theirs}, "vllm_xargs": null}}'.encode()).num_bytes
    with pytest.raises(BadBody, match="only this router writes it"):
        parse_body(f'{{"vllm_xargs": null, "vllm_xargs": {theirs}}}'.encode())


@pytest.mark.parametrize(
    ("fields", "is_local"),
    [
        ({"prompt": "a"}, False),
        ({"prompt": "a", "n": 1, "best_of": 1, "use_beam_search": False, "echo": False}, False),
        ({"prompt": "a", "n": None, "best_of": None, "echo": None, "prompt_logprobs": None}, False),
        ({"prompt": "a", "n": 2}, True),
        ({"prompt": "a", "best_of": 3}, True),
        ({"messages": [], "n": 4}, True),
        ({"prompt": [1, 2, 3]}, False),
        ({"prompt": ["a"]}, False),
        ({"prompt": [[1, 2]]}, False),
        ({"prompt": []}, False),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt": "a", "use_beam_search": True}, True),
        ({"prompt": "a", "prompt_logprobs": 0}, True),
        ({"prompt": "a", "echo": True}, True),
        ({"prompt": {}}, True),
        ({"prompt": [True, True]}, True),
        ({"prompt": "a", "echo": True, "logprobs": 1}, True),
        ({"prompt": None, "prompt_embeds": "x"}, True),
    ],
)
def test_what_decode_must_prefill_by_itself(fields: dict[str, Any], is_local: bool) -> None:
    assert parse_body(json.dumps(fields).encode()).needs_local_prefill is is_local


@pytest.mark.parametrize(
    ("prompt", "is_local"),
    [
        ("[[1,2]]", False), (" [ [ 1 , 2 ]\n] ", False), ("[[]]", False), ("[]", False), ("[ ]", False),
        ("[ 1]", False), ("[[1,2],3]", True), ("[[1,2],[3]]", True), ("[[1,2],[]]", True), ("[[[1],[2]]]", True),
        ('[[1],"]"]', True), ('["a"]', False), ('[ "a]b" ]', False), ('["a","b"]', True), ('["a",[1]]', True),
        ("[{}]", True), ("[true]", True), (f'[{" " * 99}"a"]', False), (f'[{" " * 100}"a"]', True),
    ],
)  # fmt: skip
def test_a_list_with_one_prompt_is_told_from_one_with_several(prompt: str, is_local: bool) -> None:
    assert parse_body(f'{{"prompt": {prompt}}}'.encode()).needs_local_prefill is is_local


ODD = ["2.0", '"2"', '"1"', "true", '"true"', "1e0", "1.0", "10e-1", "0", "-1", "2", "[]", "{}", '""', "123456789" * 99]


@pytest.mark.parametrize("key", PREFILLED_APART)
@pytest.mark.parametrize("value", ODD)
def test_a_number_of_sequences_that_is_not_spelled_as_one_is_decodes_to_prefill(key: str, value: str) -> None:
    assert parse_body(f'{{"prompt": "a", "{key}": {value}}}'.encode()).needs_local_prefill


@pytest.mark.parametrize("raw", ['"n":1,"n":2', '"n":1,"\\u006e":2', '"n" : 1 , "\\u006E"\n:\t2.0'])
def test_the_last_of_equal_keys_counts_in_any_spelling(raw: str) -> None:
    assert parse_body(f'{{"prompt": "a", {raw}}}'.encode()).needs_local_prefill
    assert not parse_body(f'{{"prompt": "a", {raw}, "n": 1}}'.encode()).needs_local_prefill


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 0}, None),
        ({"max_tokens": "many"}, None),
    ],
)
def test_the_limit_of_an_answer_is_the_clients(fields: dict[str, Any], limit: int | None) -> None:
    assert parse_body(json.dumps(fields).encode()).max_answer_tokens == limit


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"1", b'"x"', b"null", b"NaN", b"\xff", b'{"a": "\\ud800"}', b"{} {}", b"{} x", b"{'n': 1}"],
)
def test_what_is_no_json_object_is_a_bad_body(raw: bytes) -> None:
    with pytest.raises(BadBody):
        parse_body(raw)


def test_a_body_nested_as_deep_as_vllm_reads_passes_and_a_deeper_one_is_bad() -> None:
    body = parse_body(b'{"a":' + b"[" * 600 + b"]" * 600 + b"}")
    assert b"".join(body.for_decode(None)).count(b"[") == 600
    with pytest.raises(BadBody, match="nested too deeply"):
        parse_body(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@pytest.mark.parametrize("bomb", [b"{},", b"[],", b"1,", b'"",', b'{"":[]},'])
def test_a_body_of_many_small_values_costs_no_memory(bomb: bytes) -> None:
    raw = b'{"prompt":[' + bomb * (900_000 // len(bomb)) + b'{}],"n":[' + bomb * 30_000 + b"{}]}"
    tracemalloc.start()
    try:
        parse_body(raw).needs_local_prefill  # noqa: B018 - what it costs is asked
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 500_000


@pytest.mark.parametrize(
    ("said", "name"),
    [
        (b'"m/x-7B"', "m/x-7B"),
        (b'"\\ud83d\\ude00\\u0000"', "\U0001f600\x00"),
        (b'"\xff"', ""),
        (b'""', ""),
        (b"null", ""),
        (b'["m"]', ""),
        (b"7", ""),
    ],
)
def test_a_model_is_a_text_or_has_no_name(said: bytes, name: str) -> None:
    assert parse_body(b'{"prompt":"a","model":%b}' % said).model == name


def test_without_a_model_there_is_no_name() -> None:
    assert parse_body(b"{}").model == ""
