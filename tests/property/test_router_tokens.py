"""Whatever a client shows for a token: it raises nothing, and only what the provider has signed lets someone in."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from contextlib import suppress
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.identity import AUDIENCE, ISSUER, claims_of, key_set, signing_key
from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.apis.openai_errors import ApiError
from pdcluster_router.core.clients.tokens.claims import BadToken, TokenRules, read_claims
from pdcluster_router.core.clients.tokens.jwks import keys_in
from pdcluster_router.front.tokens.check import TokenCheck

pytestmark = pytest.mark.law

NOW: Final = 1_800_000_000
RULES: Final = TokenRules(ISSUER, AUDIENCE, "sub")
ALGORITHMS: Final = ("ES256", "RS256", "EdDSA")
TOKENS: Final = [signing_key(name, name).sign(claims_of(now=NOW)).encode() for name in ALGORITHMS]
JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["alg", "kid", "crit", "x"]), inner),
    max_leaves=6,
)

PART: Final = (
    st.binary(max_size=300).map(lambda raw: urlsafe_b64encode(raw).rstrip(b"=").decode())
    | st.sampled_from(
        ["RSA", "EC", "OKP", "oct", "P-256", "P-521", "Ed25519", "Ed448", "RS256", "ES256", "EdDSA", "sig"]
    )
    | JSON
)
"""A member of a key: a number, a word that is known, or anything."""


def check() -> TokenCheck:
    made = TokenCheck(RULES, lambda: NOW)
    made.take(key_set(*(signing_key(name, name) for name in ALGORITHMS)))
    return made


CHECK: Final = check()


def encoded(raw: bytes) -> bytes:
    return urlsafe_b64encode(raw).rstrip(b"=")


@given(st.binary(max_size=200) | st.builds(b".".join, st.lists(st.binary(max_size=40), min_size=3, max_size=3)))
def test_any_bytes_let_no_one_in_and_raise_nothing(shown: bytes) -> None:
    assert not isinstance(CHECK.admit(shown), str)


@given(st.dictionaries(st.sampled_from(["alg", "kid", "crit", "b64", "typ"]), JSON), JSON, st.binary(max_size=80))
def test_any_header_and_payload_let_no_one_in_and_raise_nothing(
    header: dict[str, object], payload: object, signature: bytes
) -> None:
    parts = (json.dumps(header).encode(), json.dumps(payload).encode(), signature)
    answer = CHECK.admit(b".".join(map(encoded, parts)))
    assert answer is None or isinstance(answer, ApiError)


@given(st.sampled_from(TOKENS), st.data())
def test_a_token_that_is_altered_in_any_byte_lets_no_one_in(token: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(token) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda one: one != token[at]))
    assert CHECK.admit(token) == "jwt:alice"
    assert not isinstance(CHECK.admit(token[:at] + bytes((byte,)) + token[at + 1 :]), str)


@given(st.sampled_from(TOKENS), st.data())
def test_a_token_that_is_cut_or_has_more_lets_no_one_in(token: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(token) - 1))
    more = data.draw(st.binary(max_size=4))
    assert token[:at] + more == token or not isinstance(CHECK.admit(token[:at] + more), str)
    assert not more or not isinstance(CHECK.admit(token + more), str)


@given(
    st.sampled_from(ALGORITHMS),
    st.dictionaries(
        st.sampled_from(["kty", "crv", "x", "y", "n", "e", "alg", "use", "kid", "key_ops"]), PART, min_size=1
    ),
)
def test_a_key_set_with_any_members_is_taken_or_refused_in_words(algorithm: str, changes: dict[str, object]) -> None:
    jwk = {**signing_key(algorithm, algorithm).jwk(), **changes}
    made = TokenCheck(RULES, lambda: NOW)
    with suppress(ConfigError):
        made.take(json.dumps({"keys": [jwk]}).encode())
    for token in TOKENS:
        made.admit(token)


@given(st.binary(max_size=300) | JSON.map(lambda told: repr(told).encode()))
def test_any_payload_and_any_key_set_is_taken_or_refused_in_words(raw: bytes) -> None:
    with suppress(BadToken):
        read_claims(raw, RULES)
    with suppress(ConfigError):
        keys_in(raw)
