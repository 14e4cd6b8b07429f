"""A request for several sequences, taken apart."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from fakes.reservations import reservation_of
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.params import DecodeParams, parse_reservation, to_wire
from pdcluster_router.core.apis.parts import MAX_PARTS, MAX_REPEATED_BYTES, Division, taken_apart
from pdcluster_router.core.apis.rewrite import parse_body

PARAMS = DecodeParams(metaserver="http://r/v1/metaserver", transfer_id=TransferId("t"), deadline_ms=9)
RESERVATION = parse_reservation(reservation_of(to_wire(PARAMS)))
HELLO = [{"role": "user", "content": "hi"}]


def apart(fields: dict[str, Any]) -> Division | None:
    return taken_apart(parse_body(json.dumps(fields).encode()), is_chat="messages" in fields, num_header_bytes=0)


def asked(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """What decode is asked for each part, without our parameters."""
    parts = apart(fields)
    assert parts is not None
    bodies = [json.loads(b"".join(body.for_decode(PARAMS))) for body in parts.bodies]
    assert all(body.pop("kv_transfer_params") == to_wire(PARAMS) for body in bodies)
    return bodies


def test_a_list_of_prompts_has_one_part_for_each_which_keeps_all_else() -> None:
    rest = {"model": "m", "max_tokens": 3, "seed": 7, "stream": True, "stop": ["a", "b"]}
    assert asked({"prompt": ["a", "b"], **rest}) == [{**rest, "prompt": ["a"]}, {**rest, "prompt": ["b"]}]
    assert asked({**rest, "prompt": [[1, 2], [3]]}) == [{**rest, "prompt": [[1, 2]]}, {**rest, "prompt": [[3]]}]


def test_choices_of_a_chat_have_seeds_of_their_own_as_vllm_gives_them() -> None:
    chat = {"messages": HELLO, "temperature": 0.5}
    assert asked({**chat, "n": 3, "seed": 0}) == [{**chat, "n": 1, "seed": seed} for seed in (0, 1, 2)]
    assert asked({**chat, "n": 2}) == [{**chat, "n": 1}] * 2
    assert asked({**chat, "n": 2, "seed": None}) == [{**chat, "n": 1, "seed": None}] * 2


def test_choices_go_by_prompt_first() -> None:
    parts = apart({"prompt": ["a", "b"], "n": 2, "seed": 7})
    assert parts is not None
    assert parts.num_choices == 2
    found = [(body["prompt"], body["seed"]) for body in asked({"prompt": ["a", "b"], "n": 2, "seed": 7})]
    assert found == [(["a"], 7), (["a"], 8), (["b"], 7), (["b"], 8)]


def test_one_prompt_with_choices_is_sent_as_the_client_wrote_it() -> None:
    for prompt in ("a", [1, 2], ["a"], [[1, 2]]):
        assert [body["prompt"] for body in asked({"prompt": prompt, "n": 2})] == [prompt, prompt]


def test_prefill_gets_the_parts_prompt_and_makes_one_token() -> None:
    parts = apart({"prompt": ["a", "b"], "n": 2, "seed": 7, "max_tokens": 9, "logprobs": 2})
    assert parts is not None
    body = json.loads(b"".join(parts.bodies[3].for_prefill(RESERVATION)))
    assert (body["prompt"], body["n"], body["max_tokens"], body["stream"]) == (["b"], 1, 1, False)
    assert body["logprobs"] is None


def test_texts_are_cut_out_byte_for_byte() -> None:
    raw = b'{"prompt": ["\\u00e9],\\"[", "\xc3\xa9" ], "stop": ["\\u00e9],\\"["], "seed":1 }'
    parts = taken_apart(parse_body(raw), is_chat=False, num_header_bytes=0)
    assert parts is not None
    first, second = (b"".join(body.for_decode(None)) for body in parts.bodies)
    assert b'"prompt":["\\u00e9],\\"["]' in first
    assert b'"prompt":["\xc3\xa9"]' in second


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a", "n": 2, "temperature": 0}, {"prompt": "a", "n": 2, "temperature": 0.0},
        {"prompt": "a", "n": 2, "temperature": "1"}, {"prompt": "a", "n": 2, "seed": 1.0},
        {"prompt": "a", "n": 2, "seed": 2**63 - 1},
        {"prompt": "a", "n": 2, "seed": -1}, {"prompt": "a", "n": 2.0}, {"prompt": "a", "n": "2"},
        {"prompt": "a", "n": 0}, {"prompt": "a", "n": -2}, {"prompt": "a", "n": True}, {"prompt": None, "n": 2},
        {"prompt": ["a", [1]]}, {"prompt": [["a"], ["b"]]}, {"prompt": [[1], []]}, {"prompt": [[1], [2.0]]},
        {"prompt": ["a", None]}, {"prompt": [{}, {}]}, {"prompt": {}}, {"prompt": [True, True]},
        {"prompt": ["a", "b"], "echo": True}, {"prompt": ["a", "b"], "prompt_logprobs": 1},
        {"prompt": "a", "n": 2, "best_of": 2}, {"prompt": "a", "n": 2, "best_of": 1},
        {"prompt": ["a", "b"], "use_beam_search": True}, {"prompt": ["a", "b"], "prompt_embeds": "x"},
        {"prompt": ["a", "b"], "stream": 1}, {"prompt": ["a", "b"], "kv_transfer_params": {}},
        {"prompt": ["a", "b"], "a_key_of_tomorrow": 1}, {"messages": HELLO, "n": 2, "prompt": "a"},
        {"messages": HELLO, "n": MAX_PARTS + 1}, {"prompt": ["a"] * (MAX_PARTS + 1)},
        {"prompt": ["a"] * (MAX_PARTS // 2), "n": 3}, {"prompt": ["a", "b"], "user": "x" * MAX_REPEATED_BYTES},
        {"prompt": ["a"] * MAX_PARTS, "user": "x" * (MAX_REPEATED_BYTES // MAX_PARTS)},
    ],
)  # fmt: skip
def test_what_may_mean_something_else_in_parts_is_served_as_a_whole(fields: dict[str, Any]) -> None:
    assert parse_body(json.dumps(fields).encode()).needs_local_prefill
    assert apart(fields) is None


@pytest.mark.parametrize(
    ("fields", "num_parts"),
    [
        ({"prompt": ["a", "b"], "temperature": 0}, 2),
        ({"prompt": ["a", "b"], "echo": False, "best_of": None, "use_beam_search": None, "stream": None}, 2),
        ({"prompt": "a", "n": 2, "temperature": 1e-5}, 2),
        ({"prompt": "a", "n": 2, "temperature": None}, 2),
        ({"messages": HELLO, "n": MAX_PARTS}, MAX_PARTS),
        ({"prompt": ["a"] * MAX_PARTS, "n": None}, MAX_PARTS),
        ({"messages": HELLO, "n": 2, "user": "x" * MAX_REPEATED_BYTES}, 2),
        ({"prompt": ["a"] * MAX_PARTS, "user": "x" * (MAX_REPEATED_BYTES // MAX_PARTS - 100)}, MAX_PARTS),
    ],
)
def test_what_means_the_same_in_parts_is_taken_apart(fields: dict[str, Any], num_parts: int) -> None:
    parts = apart(fields)
    assert parts is not None
    assert len(parts.bodies) == num_parts
    assert not any(body.needs_local_prefill for body in parts.bodies)


@pytest.mark.parametrize(
    ("fields", "begin"), [({"messages": HELLO, "n": MAX_PARTS}, b""), ({"prompt": ["a"] * MAX_PARTS}, b"{")]
)
def test_headers_that_many_parts_would_repeat_keep_the_whole_together(fields: dict[str, Any], begin: bytes) -> None:
    body = parse_body(json.dumps(fields).encode())
    most = MAX_REPEATED_BYTES // MAX_PARTS - len(begin)
    is_chat = "messages" in fields
    assert taken_apart(body, is_chat=is_chat, num_header_bytes=most) is not None
    assert taken_apart(body, is_chat=is_chat, num_header_bytes=most + 1) is None


def test_parts_of_one_prompt_share_the_clients_bytes() -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": "x" * (1 << 20)}], "n": MAX_PARTS}).encode()
    body = parse_body(raw)
    tracemalloc.start()
    try:
        assert taken_apart(body, is_chat=True, num_header_bytes=0) is not None
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 500_000


@pytest.mark.parametrize("bomb", ["{},", "[],", "1,", '"",', "[1],", '{"":[]},'])
def test_a_body_of_many_small_values_costs_no_memory(bomb: str) -> None:
    for raw in (f'{{"prompt":[{bomb * 100_000}{bomb[:-1]}]}}', f'{{"n":2,"a":[{bomb * 100_000}1]}}'):
        body = parse_body(raw.encode())
        tracemalloc.start()
        try:
            assert taken_apart(body, is_chat=False, num_header_bytes=0) is None
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 500_000
