"""Which tokens let a client in, by the keys of now, and what a token costs that comes again."""

from __future__ import annotations

import hmac
import json
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import Any, Final

import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from fakes.identity import AUDIENCE, ISSUER, KIND_OF, claims_of, key_set, signing_key
from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.apis.openai_errors import ApiError
from pdcluster_router.core.clients.tokens.claims import TokenRules
from pdcluster_router.front.tokens.check import TokenCheck
from pdcluster_router.front.tokens.key_set import KeySet

NOW: Final = 1_800_000_000


class Checked:
    """A check whose clock the test sets."""

    def __init__(self, *keys: str) -> None:
        self.now: float = NOW
        self.asked = 0
        self.check = TokenCheck(TokenRules(ISSUER, AUDIENCE, "sub"), lambda: self.now)
        self.check.on_unknown_key = self._ask
        if keys:
            self.check.take(key_set(*map(signing_key, keys)))

    def _ask(self) -> None:
        self.asked += 1

    def admit(self, token: str | bytes) -> str | ApiError | None:
        return self.check.admit(token if isinstance(token, bytes) else token.encode())

    def refusal(self, token: str | bytes) -> str:
        """Its message. The answer is a 401 that any client's library understands."""
        error = self.admit(token)
        assert isinstance(error, ApiError)
        assert (error.status, error.code) == (401, "invalid_token")
        assert error.challenge == f'Bearer error="invalid_token", error_description="{error.message}"'
        return error.message


def token(key_id: str = "first", algorithm: str = "ES256", headers: dict[str, Any] | None = None, **claims: Any) -> str:
    return signing_key(key_id, algorithm).sign(claims_of(now=NOW, **claims), **(headers or {}))


def unsigned(header: dict[str, Any], signature: bytes) -> bytes:
    parts = (json.dumps(header).encode(), json.dumps(claims_of(now=NOW)).encode(), signature)
    return b".".join(urlsafe_b64encode(part).rstrip(b"=") for part in parts)


def _too_costly(*_: object, **__: object) -> None:
    raise AssertionError("a signature is costly")


@pytest.mark.parametrize("algorithm", KIND_OF)
def test_a_token_of_each_algorithm_lets_its_client_in(algorithm: str) -> None:
    checked = Checked()
    checked.check.take(key_set(signing_key("k", algorithm)))
    assert checked.admit(token("k", algorithm)) == "jwt:alice"


def test_what_is_no_token_is_left_to_the_api_keys() -> None:
    assert Checked("first").admit("sk-secret") is None
    assert Checked().admit("a.b.c") is None


def test_a_token_that_comes_again_costs_no_check_of_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Checked("first")
    first = token()
    assert checked.admit(first) == "jwt:alice"
    monkeypatch.setattr(jwt.PyJWS, "decode", _too_costly)
    assert checked.admit(first) == "jwt:alice"
    with pytest.raises(AssertionError, match="costly"):
        checked.admit(token(sub="bob"))


def test_a_remembered_token_ends_at_its_time_without_another_check_of_its_signature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = Checked("first")
    once = token()
    assert checked.admit(once) == "jwt:alice"
    monkeypatch.setattr(KeySet, "payload_of", _too_costly)
    checked.now += 4000
    for _ in range(2):
        assert "exp is 1800003600, and it is 1800004000: ask for a new token" in checked.refusal(once)


def test_other_keys_end_the_tokens_of_the_old_ones_and_the_same_keys_do_not() -> None:
    checked = Checked("first")
    changes: list[bool] = []
    checked.check.on_change = lambda: changes.append(True)
    once = token()
    assert checked.admit(once) == "jwt:alice"
    checked.check.take(key_set(signing_key()))
    assert not changes
    checked.check.take(key_set(signing_key("second")))
    assert changes == [True]
    assert "kid is first, and none of the 1 known keys has it" in checked.refusal(once)
    assert checked.asked == 1
    assert checked.admit(token("second")) == "jwt:alice"


def test_keys_that_cannot_be_used_leave_the_old_ones() -> None:
    checked = Checked("first")
    with pytest.raises(ConfigError):
        checked.check.take(b"<html>")
    assert checked.admit(token()) == "jwt:alice"


def test_without_keys_a_token_is_told_to_come_again() -> None:
    checked = Checked()
    error = checked.admit(token())
    assert isinstance(error, ApiError)
    assert (error.status, error.code, error.retry_after_s) == (503, "no_token_keys", 2)
    assert ISSUER in checked.check.problem
    checked.check.take(key_set(signing_key()))
    assert checked.check.problem == ""


def test_a_token_without_a_kid_is_of_the_only_key_that_there_is() -> None:
    plain = token(headers={"kid": None})
    assert Checked("first").admit(plain) == "jwt:alice"
    assert "names no key (kid), and there are 2" in Checked("first", "second").refusal(plain)
    assert "the signature of the token is not of the key" in Checked("second").refusal(plain)


def test_keys_of_one_kid_are_told_apart_by_their_algorithm() -> None:
    checked = Checked()
    checked.check.take(key_set(signing_key("k", "RS256"), signing_key("k", "ES256")))
    assert [checked.admit(token("k", name)) for name in ("ES256", "RS256")] == ["jwt:alice"] * 2


def test_a_signature_of_another_key_lets_no_one_in() -> None:
    forged = signing_key("other").sign(claims_of(now=NOW), kid="first")
    assert "the signature of the token is not of the key that it names" in Checked("first").refusal(forged)


@pytest.mark.parametrize("algorithm", ["none", "None", "HS256", "HS512", "ES256K", "", "RS1"])
def test_an_algorithm_without_a_private_key_is_never_taken(algorithm: str) -> None:
    assert "which is not taken" in Checked("first").refusal(unsigned({"alg": algorithm, "kid": "first"}, b"\0" * 32))


def test_a_token_signed_with_the_public_key_as_a_secret_lets_no_one_in() -> None:
    key = signing_key("k", "RS256")
    checked = Checked()
    checked.check.take(key_set(key))
    format_ = serialization.PublicFormat.SubjectPublicKeyInfo
    secret = key.private.public_key().public_bytes(serialization.Encoding.PEM, format_)
    said = unsigned({"alg": "HS256", "kid": "k"}, b"").rpartition(b".")[0]
    signature = urlsafe_b64encode(hmac.digest(secret, said, sha256)).rstrip(b"=")
    assert "alg is HS256, which is not taken" in checked.refusal(said + b"." + signature)


def test_an_algorithm_of_another_key_is_not_taken() -> None:
    checked = Checked()
    checked.check.take(key_set(signing_key("k", "RS256"), signing_key("other")))
    assert "alg is ES256, and the key signs by RS256" in checked.refusal(token("other", headers={"kid": "k"}))
    lying = unsigned({"alg": "PS256", "kid": "k"}, b"\0" * 256)
    assert "alg is PS256, and the key signs by RS256" in checked.refusal(lying)


def test_a_key_set_whose_numbers_are_no_keys_is_refused() -> None:
    jwk = {**signing_key().jwk(), "x": "AAAA"}
    with pytest.raises(ConfigError, match="of its 1 keys none can be read"):
        KeySet(json.dumps({"keys": [jwk]}).encode())
    assert len(KeySet(json.dumps({"keys": [jwk, signing_key("b").jwk()]}).encode())) == 1


def test_a_key_without_a_name_may_have_signed_a_token_that_names_one() -> None:
    checked = Checked()
    (key,) = json.loads(key_set(signing_key("first")))["keys"]
    del key["kid"]
    checked.check.take(json.dumps({"keys": [key]}).encode())
    assert checked.admit(token("first")) == "jwt:alice"
    assert checked.asked == 0


def test_of_two_keys_with_one_name_either_may_have_signed() -> None:
    checked = Checked()
    keys = [{**key, "kid": "same"} for key in json.loads(key_set(signing_key("first"), signing_key("second")))["keys"]]
    checked.check.take(json.dumps({"keys": keys}).encode())
    assert [checked.admit(token(name, headers={"kid": "same"})) for name in ("first", "second")] == ["jwt:alice"] * 2


def test_a_header_that_is_nested_deeply_is_refused_as_any_other() -> None:
    checked = Checked("first")
    header = b'{"alg":' + b"[" * 1000 + b"]" * 1000 + b"}"
    shown = b".".join(urlsafe_b64encode(part).rstrip(b"=") for part in (header, b"{}", b"abc"))
    assert "alg is no text, which is not taken" in checked.refusal(shown)


@pytest.mark.parametrize(("claim", "says"), [("iss", "iss is no text"), ("exp", "exp is no text")])
def test_a_claim_that_is_nested_deeply_is_refused_as_any_other(claim: str, says: str) -> None:
    nested: list[Any] = []
    for _ in range(400):
        nested = [nested]
    payload = json.dumps({**claims_of(now=NOW), claim: nested}).encode()
    signed = jwt.api_jws.encode(payload, signing_key("first").private, "ES256", {"kid": "first"})
    assert says in Checked("first").refusal(signed)


@pytest.mark.parametrize("seconds", [1e300, -1e300, 10**15])
def test_a_time_that_no_token_has_is_refused_in_a_short_error(seconds: float) -> None:
    said = Checked("first").refusal(token(exp=seconds))
    assert said.startswith("exp is ")
    assert len(said) < 200


def test_the_same_keys_in_another_order_are_no_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, changes = Checked("first", "second"), []
    known = token("second")
    assert checked.admit(known) == "jwt:alice"
    checked.check.on_change = lambda: changes.append(1)
    checked.check.take(key_set(signing_key("second"), signing_key("first")))
    monkeypatch.setattr(jwt.PyJWS, "decode", _too_costly)
    assert checked.admit(known) == "jwt:alice"
    assert changes == []


@pytest.mark.parametrize("change", [{"alg": None}, {"kid": "third"}, signing_key("other").jwk(kid="second")])
def test_a_key_with_another_name_algorithm_or_number_is_another_key(change: dict[str, Any]) -> None:
    checked, changes = Checked(), []
    first, second = signing_key("first", "RS256"), signing_key("second", "RS256")
    checked.check.take(json.dumps({"keys": [first.jwk(), second.jwk()]}).encode())
    checked.check.on_change = lambda: changes.append(1)
    checked.check.take(json.dumps({"keys": [{**second.jwk(), **change}, first.jwk()]}).encode())
    assert changes == [1]


def test_each_good_look_at_the_keys_renews_their_age_and_no_other_does() -> None:
    checked, other = Checked(), signing_key("second")
    for document in (key_set(signing_key(), other), key_set(signing_key(), other), key_set(other, signing_key())):
        checked.now += 70
        assert checked.check.age_s() == 70
        checked.check.take(document)
        assert checked.check.age_s() == 0
    checked.now += 70
    with pytest.raises(ConfigError):
        checked.check.take(b"<html>")
    assert checked.check.age_s() == 70


def test_the_same_large_keys_in_another_order_are_not_named_again(caplog: pytest.LogCaptureFixture) -> None:
    large = signing_key("k", "RS256").jwk(kid="large", n=urlsafe_b64encode(b"\xff" * 1024).decode().rstrip("="))
    checked = Checked()
    for keys in ([large, signing_key().jwk()], [signing_key().jwk(), large]):
        checked.check.take(json.dumps({"keys": keys}).encode())
    assert len(caplog.records) == 1


def test_one_line_says_which_keys_are_too_large(caplog: pytest.LogCaptureFixture) -> None:
    large = signing_key("k", "RS256").jwk(kid="large", n=urlsafe_b64encode(b"\xff" * 1024).decode().rstrip("="))
    document = json.dumps({"keys": [large, signing_key().jwk()]}).encode()
    checked = Checked()
    for _ in range(2):
        checked.check.take(document)
    assert checked.admit(token()) == "jwt:alice"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "keys=1 first: kid=large bits=8192" in line
