"""The order to verify and its answer: each end reads what the other writes, and says why something is no order."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.labels import Role
from pdcluster_protocol.verify import VerifiedEngine, VerifyAnswer, VerifyOrder, parse_order
from unit.protocol.messages import any_message

ANSWER = VerifyAnswer(
    revision="r",
    prefill=VerifiedEngine("prefill-0", "p0"),
    decode=VerifiedEngine("decode-0", ""),
    prompt_tokens=42,
    pushed_tokens=26,
    block_tokens=16,
    transfer_protocol="tcp",
    seconds=0.125,
)


@given(any_message(VerifyOrder))
def test_an_order_survives_json(order: VerifyOrder) -> None:
    assert parse_order(msgspec.json.encode(order)) == order


@given(any_message(VerifyAnswer))
def test_an_answer_survives_json(answer: VerifyAnswer) -> None:
    assert msgspec.json.decode(msgspec.json.encode(answer), type=VerifyAnswer) == answer


def test_the_words_are_those_of_earlier_releases() -> None:
    """An operator and a router of two releases meet at each upgrade."""
    order = {"revision": "r", "prefill_pods": ["p0"], "decode_pods": ["d0", "d1"], "timeout_s": 5.0}
    assert parse_order(json.dumps(order).encode()) == VerifyOrder("r", ("p0",), ("d0", "d1"), 5.0)
    assert json.loads(msgspec.json.encode(VerifyOrder("r", ("p0",), ("d0", "d1"), 5.0))) == order
    assert json.loads(msgspec.json.encode(ANSWER)) == {
        "verified": True,
        "revision": "r",
        "prefill": {"name": "prefill-0", "pod": "p0"},
        "decode": {"name": "decode-0", "pod": ""},
        "prompt_tokens": 42,
        "pushed_tokens": 26,
        "block_tokens": 16,
        "is_content_compared": True,
        "transfer_protocol": "tcp",
        "seconds": 0.125,
    }


def test_an_empty_order_is_for_any_pair_without_a_revision() -> None:
    order = parse_order(b"{}")
    assert (order.revision, order.timeout_s) == ("", 30.0)
    assert [order.pods(role) for role in Role] == [None, None]


def test_the_pods_of_a_role_are_those_that_the_order_names() -> None:
    order = parse_order(b'{"prefill_pods": ["p0", "p1"], "decode_pods": []}')
    assert order.pods(Role.PREFILL) == frozenset({"p0", "p1"})
    assert order.pods(Role.DECODE) == frozenset()


@pytest.mark.parametrize("timeout_s", [1, 120])
def test_the_bounds_of_the_time_are_within_it(timeout_s: int) -> None:
    assert parse_order(json.dumps({"timeout_s": timeout_s}).encode()).timeout_s == timeout_s


def test_the_longest_order_is_read() -> None:
    pods = [f"{number:0253}" for number in range(1000)]
    order = {"revision": "r" * 253, "prefill_pods": pods, "decode_pods": None}
    assert parse_order(json.dumps(order).encode()).pods(Role.PREFILL) == frozenset(pods)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "the body: Input data was truncated"),
        (b"[]", "the body: Expected `object`, got `array`"),
        (b'{"a": 1}', "the body: Object contains unknown field `a`"),
        (b'{"timeout_s": 0.9}', "timeout_s: Expected `float` >= 1.0"),
        (b'{"timeout_s": 121}', "timeout_s: Expected `float` <= 120.0"),
        (b'{"timeout_s": "30"}', "timeout_s: Expected `float`, got `str`"),
        (b'{"revision": null}', "revision: Expected `str`, got `null`"),
        (json.dumps({"revision": "r" * 254}).encode(), "revision: Expected `str` of length <= 253"),
        (json.dumps({"decode_pods": ["d"] * 1001}).encode(), "decode_pods: Expected `array` of length <= 1000"),
        (b'{"prefill_pods": ["p", 1]}', "prefill_pods[1]: Expected `str`, got `int`"),
        (b'{"revision": "\xff"}', "the body: 'utf-8' codec can't decode byte 0xff"),
        (b'{"revision": "\\udc00"}', "the body: JSON is malformed: invalid utf-16 surrogate pair"),
    ],
)
def test_what_is_no_order_is_refused_by_the_name_of_the_field(body: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse_order(body)
    assert str(refused.value).startswith(reason)


def test_an_answer_may_say_more_than_is_read() -> None:
    told = {**json.loads(msgspec.json.encode(ANSWER)), "of_a_later_release": [1]}
    told["prefill"]["node"] = "n"
    assert msgspec.json.decode(json.dumps(told), type=VerifyAnswer) == ANSWER
