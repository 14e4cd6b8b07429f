"""Requests to pooling models: decode's body, and what the router knows of such a request."""

from __future__ import annotations

import json

import pytest

from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams
from pdcluster_router.core.apis.client_apis import API_OF, OPENAI, POOLING, api_of
from pdcluster_router.core.apis.pooling import POOLING_PATHS, parse_pooling
from pdcluster_router.core.apis.rewrite import BadBody

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
    assert (POOLING.is_pooling, OPENAI.is_pooling) == (True, False)
    assert all(api_of(path).error_body is POOLING.error_body for path in POOLING_PATHS)


def test_no_bytes_of_an_answer_mark_it_as_given_up() -> None:
    watch = POOLING.watch(POOLING.marks or {})
    binary = b'\x00"finish_reason":"abort"\xff'
    assert (watch.feed(binary), watch.message(), watch.problem_at_end()) == (binary, None, "")
