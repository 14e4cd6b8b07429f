"""Requests to pooling models: decode's body, and what the router knows of such a request."""

from __future__ import annotations

import json

import pytest

from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams
from pdcluster_router.core.apis.client_apis import API_OF, OPENAI, POOLING, SCORING, ClientApi, api_of
from pdcluster_router.core.apis.pooling import POOLING_PATHS, SCORING_PATHS, parse_pooling, parse_scoring
from pdcluster_router.core.apis.rewrite import BadBody
from pdcluster_router.core.apis.sse import KEPT_BYTES

ODD = b'{ "input" : ["\\u00e9 }", 7], "model":"e5" , "stream":true,"n":4,"prompt":["a","b"],"kv_transfer_params":{} }'
PARAMS = DecodeParams(metaserver="http://r/v1/metaserver", transfer_id=TransferId("t"), deadline_ms=9)


@pytest.mark.parametrize("params", [None, PARAMS, b"{}"], ids=["none", "ours", "another dialect's"])
def test_decode_gets_the_clients_own_bytes(params: DecodeParams | bytes | None) -> None:
    assert b"".join(parse_pooling(ODD).for_decode(params)) == ODD


def test_an_alias_is_replaced_by_a_key_behind_the_clients() -> None:
    sent = b"".join(parse_pooling(ODD).for_model(b'"intfloat/e5"').for_decode(None))
    assert sent == ODD[:-1] + b',"model":"intfloat/e5"}'
    assert json.loads(sent)["model"] == "intfloat/e5"


def test_only_the_models_name_counts() -> None:
    body = parse_pooling(ODD)
    assert (body.model, bytes(body.model_said), body.is_stream) == ("e5", b'"e5"', False)
    assert (bytes(body.messages), bytes(body.prompt), body.session_id) == (b"", b"", b"")
    assert (body.needs_pair, body.needs_local_prefill, body.wants_decode_alone) == (False, True, True)
    assert body.max_answer_tokens == 0
    assert body.estimated_prompt_tokens == len(ODD) // 4


def test_a_request_without_its_bytes_keeps_its_length() -> None:
    forgotten = parse_pooling(ODD).forgotten()
    assert (forgotten.num_bytes, forgotten.estimated_prompt_tokens, forgotten.is_stream) == (0, len(ODD) // 4, False)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"vllm_xargs":{"kv_transfer_params":1}}'])
def test_a_body_that_is_no_object_or_names_parameters_of_ours_is_refused(raw: bytes) -> None:
    with pytest.raises(BadBody):
        parse_pooling(raw)


def test_its_paths_are_hot_and_their_errors_have_openais_shape() -> None:
    assert all(API_OF[path] is POOLING for path in POOLING_PATHS)
    assert all(API_OF[path] is SCORING for path in SCORING_PATHS)
    assert (POOLING.is_pooling, SCORING.is_pooling, OPENAI.is_pooling) == (True, True, False)
    assert all(api_of(path).error_body is POOLING.error_body for path in (*POOLING_PATHS, *SCORING_PATHS))


def test_no_bytes_of_an_answer_mark_it_as_given_up() -> None:
    watch = POOLING.watch(POOLING.marks or {})
    binary = b'\x00"finish_reason":"abort"\xff'
    assert (watch.feed(binary), watch.message(), watch.problem_at_end()) == (binary, None, "")


@pytest.mark.parametrize("api", [POOLING, SCORING], ids=["pooling", "scoring"])
def test_an_answer_passes_whole_whatever_its_bytes_are_and_its_end_is_kept(api: ClientApi) -> None:
    watch = api.watch(api.marks or {})
    binary = b'\x00\ndata: {"error": {"message": "no"}}\n\n' * 100
    pieces = [binary[at : at + 77] for at in range(0, len(binary), 77)]
    assert all(watch.feed(piece) is piece for piece in pieces)
    assert (watch.has_error, watch.message(), watch.problem_at_end()) == (False, None, "")
    assert bytes(watch.end) == binary[-KEPT_BYTES:]


# Scores and ranks.

QUERY, TEXT = "q" * 400, "t" * 4000


@pytest.mark.parametrize(
    ("one", "others"),
    [
        ("query", "documents"),
        ("queries", "documents"),
        ("queries", "items"),
        ("text_1", "text_2"),
        ("data_1", "data_2"),
    ],
)
def test_the_text_that_is_scored_counts_once_for_each_of_the_others(one: str, others: str) -> None:
    raw = json.dumps({"model": "e5", one: QUERY, others: [TEXT] * 20, "top_n": 3}).encode()
    assert parse_scoring(raw).estimated_prompt_tokens == len(raw) // 4 + 19 * ((len(QUERY) + 2) // 4)
    assert parse_pooling(raw).estimated_prompt_tokens == len(raw) // 4
    assert b"".join(parse_scoring(raw).for_decode(None)) == raw


@pytest.mark.parametrize(
    "said",
    [
        {"query": QUERY, "documents": TEXT},
        {"query": QUERY, "documents": [TEXT]},
        {"query": QUERY, "documents": []},
        {"text_1": [QUERY] * 9, "text_2": [TEXT] * 9},
        {"query": QUERY},
        {"documents": [TEXT] * 9},
        {"query": None, "documents": {"content": []}},
    ],
)
def test_texts_that_are_computed_once_count_once(said: dict[str, object]) -> None:
    raw = json.dumps(said).encode()
    assert parse_scoring(raw).estimated_prompt_tokens == len(raw) // 4


def test_texts_may_be_one_in_a_list_or_objects() -> None:
    document = {"content": [{"type": "text", "text": TEXT}, {"type": "text", "text": TEXT}]}
    raw = json.dumps({"queries": [QUERY], "documents": [document] * 20}).encode()
    assert parse_scoring(raw).estimated_prompt_tokens == len(raw) // 4 + 19 * ((len(QUERY) + 4) // 4)


@pytest.mark.parametrize("number", [999, 1000, 1001, 20_001])
@pytest.mark.parametrize("text", ["t", "", '"', "\\", '\\"', '\\\\",', "[,]"])
def test_the_texts_of_a_long_list_are_counted_whatever_is_in_them(text: str, number: int) -> None:
    raw = json.dumps({"query": QUERY, "documents": [text] * number}).encode()
    assert parse_scoring(raw).estimated_prompt_tokens == len(raw) // 4 + (number - 1) * ((len(QUERY) + 2) // 4)


def test_an_alias_and_a_bad_body_are_as_elsewhere() -> None:
    raw = b'{"model":"fast","query":"a","documents":["b"]}'
    assert b"".join(parse_scoring(raw).for_model(b'"e5"').for_decode(None)) == raw[:-1] + b',"model":"e5"}'
    with pytest.raises(BadBody):
        parse_scoring(b"[]")


def test_a_body_is_a_bad_one_or_a_good_one_at_each_depth() -> None:
    """The second scan has less room on the stack than the first one."""
    seen = set()
    for depth in range(900, 1100):
        raw = b'{"query":"abc","documents":[' + b"[" * depth + b"]" * depth + b",1]}"
        try:
            seen.add(bool(parse_scoring(raw).estimated_prompt_tokens))
        except BadBody:
            seen.add(False)
    assert seen == {True, False}


def test_no_score_outweighs_all_other_requests() -> None:
    raw = json.dumps({"query": "q" * 400_000, "documents": [""] * 100_000}).encode()
    assert parse_scoring(raw).estimated_prompt_tokens == 129 * (len(raw) // 4)
    raw = json.dumps({"query": "q" * 400_000, "documents": ["", ""]}).encode()
    assert parse_scoring(raw).estimated_prompt_tokens == len(raw) // 4 + (32 << 10)
