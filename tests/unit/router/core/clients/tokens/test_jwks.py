"""Which keys of a key set may sign tokens, and by which algorithms."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from fakes.identity import KIND_OF, SigningKey, key_set, signing_key
from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.clients.tokens.jwks import ALGORITHMS, MAX_DOCUMENT_BYTES, MAX_SET_KEYS, PublicJwk, keys_in

RSA_ALGORITHMS = {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}


def read(*jwks: object) -> tuple[PublicJwk, ...]:
    return keys_in(document_of(*jwks)).keys


def document_of(*jwks: object) -> bytes:
    return json.dumps({"keys": jwks}).encode()


def rsa_jwk(bits: int, **changes: object) -> dict[str, object]:
    """An RSA key of so many bits without a private part: only its size counts."""
    number = urlsafe_b64encode(((1 << bits) - 1).to_bytes((bits + 7) // 8)).decode().rstrip("=")
    return {"kty": "RSA", "kid": "large", "n": number, "e": "AQAB", **changes}


@pytest.mark.parametrize("algorithm", KIND_OF)
def test_each_kind_of_key_signs_by_what_it_says_or_by_all_that_it_can(algorithm: str) -> None:
    key = signing_key("k", algorithm)
    (said,) = read(key.jwk())
    assert (said.key_id, set(said.algorithms)) == ("k", {algorithm})
    (unsaid,) = read(key.jwk(alg=None, kid=None))
    assert unsaid.key_id is None
    assert set(unsaid.algorithms) == (RSA_ALGORITHMS if KIND_OF[algorithm] == "RSA" else {algorithm})


def test_only_public_members_are_kept() -> None:
    (key,) = read(signing_key().jwk(d="secret", x5c=["..."]))
    assert set(key.members) == {"kty", "crv", "x", "y"}


@pytest.mark.parametrize(
    "changes",
    [
        {"use": "enc"},
        {"alg": "HS256"},
        {"alg": "none"},
        {"alg": "RS256"},
        {"alg": ["ES256"]},
        {"kty": "oct", "k": "c2VjcmV0"},
        {"crv": "secp256k1"},
        {"kty": None},
    ],
)
def test_a_key_of_another_kind_or_use_is_left_out(changes: dict[str, Any]) -> None:
    other = signing_key("other")
    assert [key.key_id for key in read(signing_key().jwk(**changes), other.jwk())] == ["other"]


def test_what_is_no_key_is_left_out() -> None:
    assert len(read(5, None, {}, {**signing_key().jwk(), "key_ops": ["sign"]}, signing_key().jwk())) == 1


@pytest.mark.parametrize("bits", [1024, 2040])
def test_a_small_rsa_key_is_left_out(bits: int) -> None:
    small = SigningKey("small", "RS256", rsa.generate_private_key(65537, bits))
    with pytest.raises(ConfigError, match=r"of its 1 keys none can be used.*2048 to"):
        read(small.jwk())


def test_a_large_rsa_key_is_left_out_and_named() -> None:
    found = keys_in(document_of(rsa_jwk(4096, kid="fits"), rsa_jwk(4097), rsa_jwk(8192, kid=None), rsa_jwk(1024)))
    assert [key.key_id for key in found.keys] == ["fits"]
    assert found.too_large == ("kid=large bits=4097", "kid=none bits=8192")


def test_a_key_set_of_nothing_else_says_which_key_is_too_large() -> None:
    with pytest.raises(ConfigError, match=r"none can be used \(kid=large bits=8192\).*RSA with 2048 to 4096 bits"):
        keys_in(document_of(rsa_jwk(8192)))


def test_the_name_of_a_large_key_may_be_anything() -> None:
    deep: list[object] = []
    for _ in range(900):
        deep = [deep]
    found = keys_in(document_of(rsa_jwk(8192, kid=deep), signing_key().jwk()))
    assert found.too_large == ("kid=none bits=8192",)


@pytest.mark.parametrize(
    "changes", [{"use": "enc"}, {"n": 5}, {"n": "!"}, {"kty": "oct"}, {"alg": "RSA-OAEP-256"}, {"alg": 7}]
)
def test_a_key_that_signs_nothing_is_not_called_too_large(changes: dict[str, object]) -> None:
    assert keys_in(document_of(rsa_jwk(8192, **changes), signing_key().jwk())).too_large == ()


@pytest.mark.parametrize("changes", [{"e": "AQ"}, {"e": "AQAAAAAAAAE"}, {"e": "!"}, {"n": "A"}, {"n": None}])
def test_numbers_that_are_no_rsa_key_are_left_out(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="none can be used"):
        read(signing_key("k", "RS256").jwk(**changes))


@pytest.mark.parametrize("document", [b"", b"<html>", b"[]", b"{}", b'{"keys": {}}', b"\xff", b"[" * 5000])
def test_what_is_no_key_set_is_refused_with_the_cure(document: bytes) -> None:
    with pytest.raises(ConfigError, match="it is no key set: name a JSON document"):
        keys_in(document)


def test_a_document_is_bounded_in_bytes_and_keys() -> None:
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        keys_in(b" " * (MAX_DOCUMENT_BYTES + 1))
    with pytest.raises(ConfigError, match="it has 1001 keys, at most 1000"):
        read(*[5] * (MAX_SET_KEYS + 1))
    with pytest.raises(ConfigError, match="of its 0 keys"):
        read()


def test_no_algorithm_is_without_a_private_key() -> None:
    assert not [name for name in ALGORITHMS if name == "none" or name.startswith("HS")]
    assert len(keys_in(key_set(signing_key(), signing_key("second"))).keys) == 2
