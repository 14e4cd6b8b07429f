"""Which tokens are taken for tokens, which claims let a client in, and how long."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from typing import Any, Final

import pytest

from fakes.identity import AUDIENCE, ISSUER, claims_of, token_of
from pdcluster_router.core.clients.api_keys import MAX_NAME_CHARS
from pdcluster_router.core.clients.tokens.claims import (
    LEEWAY_S,
    MAX_TOKEN_BYTES,
    BadToken,
    GoodToken,
    TokenHeader,
    TokenRules,
    read_claims,
    read_header,
    safe,
    time_problem,
)

NOW: Final = 1_800_000_000
RULES: Final = TokenRules(ISSUER, AUDIENCE, "sub")


def part(told: object) -> bytes:
    return urlsafe_b64encode(json.dumps(told).encode()).rstrip(b"=")


def token(header: object, signature: bytes = b"AAAA") -> bytes:
    return part(header) + b"." + part({}) + b"." + signature


def read(**changes: Any) -> GoodToken:
    return read_claims(json.dumps(claims_of(now=NOW, **changes)).encode(), RULES)


@pytest.mark.parametrize(
    ("header", "read"),
    [
        ({"alg": "RS256", "kid": "a"}, TokenHeader("RS256", "a")),
        ({"alg": "RS256"}, TokenHeader("RS256", None)),
        ({"alg": "none", "kid": 5}, TokenHeader("none", None)),
    ],
)
def test_a_header_names_its_algorithm_and_key(header: dict[str, Any], read: TokenHeader) -> None:
    assert read_header(token(header)) == read


@pytest.mark.parametrize(
    "shown",
    [
        b"sk-a.b.c",
        b"a.b",
        b"",
        b"..",
        b"\xff.\xff.\xff",
        token([]),
        token({"typ": "JWT"}),
        token({"alg": "x"}) + b".e30",
    ],
)
def test_what_has_no_header_of_a_token_may_be_an_api_key(shown: bytes) -> None:
    assert read_header(shown) is None


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        (token({"alg": "RS256", "crit": ["b64"]}), "critical extension"),
        (token({"alg": "RS256"}, b""), "no signature"),
        (token({"alg": "RS256"}, b"A"), "no signature"),
        (token({"alg": "RS256"}, b"AB"), "no signature"),  # AA has the same bytes.
        (token({"alg": "RS256"}, b"A" * MAX_TOKEN_BYTES), "at most 8192 are taken"),
    ],
)
def test_a_token_of_a_form_that_is_not_taken_says_why(shown: bytes, says: str) -> None:
    with pytest.raises(BadToken, match=says):
        read_header(shown)


def test_a_good_token_has_a_client_and_its_times() -> None:
    assert read() == GoodToken("jwt:alice", NOW, NOW + 3600)
    assert read(nbf=NOW + 5).not_before == NOW + 5
    assert read(iat=None).not_before == 0.0
    assert read(aud=["other", AUDIENCE]).client == "jwt:alice"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"iss": "https://evil.example"}, f"iss is https://evil.example, and {ISSUER} is expected"),
        ({"iss": None}, "iss is missing"),
        ({"iss": 5}, "iss is 5"),
        ({"aud": "other"}, "aud is other, and pool is expected"),
        ({"aud": ["a", "b"]}, r"aud is \[\?a\?,\?b\?\], and pool"),
        ({"aud": None}, "aud is missing"),
        ({"aud": {"pool": 1}}, "pool is expected"),
        ({"exp": None}, "exp is missing"),
        ({"exp": "1800000000"}, "exp is 1800000000: ask"),
        ({"exp": True}, "exp is true"),
        ({"nbf": "now"}, "nbf is now"),
        ({"iat": []}, r"iat is \[\]"),
        ({"sub": None}, "sub names the client with 1 to 128 .* is missing: see --jwt-client-claim"),
        ({"sub": 5}, "no such text"),
        ({"sub": ""}, "no such text"),
        ({"sub": "a b"}, "no such text"),
        ({"sub": "a\nb"}, "no such text"),
        ({"sub": "jörg"}, "no such text"),
        ({"sub": "x" * (MAX_NAME_CHARS + 1)}, "no such text"),
    ],
)
def test_a_claim_that_is_wrong_is_named_with_both_values_and_the_cure(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadToken, match=says):
        read(**changes)


@pytest.mark.parametrize("payload", [b"", b"[]", b"\xff", b"null", b"{" * 5000])
def test_a_payload_that_is_no_object_lets_no_one_in(payload: bytes) -> None:
    with pytest.raises(BadToken, match="no JSON object"):
        read_claims(payload, RULES)


def test_another_claim_may_name_the_client() -> None:
    rules = TokenRules(ISSUER, AUDIENCE, "client_id")
    assert read_claims(json.dumps(claims_of(client_id="batch")).encode(), rules).client == "jwt:batch"


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (-LEEWAY_S - 1, "nbf or iat is 1800000000"),
        (-LEEWAY_S, ""),
        (0, ""),
        (3600 + LEEWAY_S - 1, ""),
        (3600 + LEEWAY_S, "exp is 1800003600, and it is 1800003630: ask for a new token"),
    ],
)
def test_a_token_lets_in_between_its_times_with_some_leeway(seconds: float, says: str) -> None:
    assert time_problem(read(), NOW + seconds).startswith(says)
    assert bool(time_problem(read(), NOW + seconds)) is bool(says)


def test_an_error_quotes_no_more_than_a_header_may_hold() -> None:
    assert safe('a"b\\c\r\nd\x7fé') == "a?b?c??d??"
    assert len(safe("x" * 1000)) < 100
    assert safe("") == "empty"


def test_a_real_token_is_read() -> None:
    assert read_header(token_of().encode()) == TokenHeader("ES256", "first")
