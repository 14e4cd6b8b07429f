"""Reads a client's token (JWT, RFC 7519) and judges its claims. A library checks its signature, in ``front/tokens``.

    header . payload . signature      each in base64url, without padding
    read_header  --the library checks the signature-->  read_claims  --at each request-->  time_problem

Messages quote a claim only after its signature was checked, and never a part of the token itself.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from pdcluster_router.core.apis.openai_errors import JWT_PREFIX
from pdcluster_router.core.clients.api_keys import MAX_NAME_CHARS

MAX_TOKEN_BYTES: Final = 8 << 10
"""Tokens of identity providers have one to two KiB, with many groups some more."""
LEEWAY_S: Final = 30.0
"""Seconds by which the clocks of the identity provider and this machine may differ."""
_NAME: Final = re.compile(rf"[!-~]{{1,{MAX_NAME_CHARS}}}")
_PARTS: Final = re.compile(rb"([\w-]++)\.([\w-]*+)\.([\w-]*+)")
"""Gives nothing back: a long API key without a dot would cost it a millisecond."""
_MAX_SHOWN_CHARS: Final = 80
_NO_TEXT: Final = "no text"
_MOST_S: Final = 1e12
"""No time of a token is later: some 30,000 years."""
_NOT_SHOWN: Final = re.compile(r'[^ -~]|["\\]')
"""No character of these may stand in ``error_description`` (RFC 6750, section 3)."""
_STARTS: Final = ("nbf", "iat")
"""Claims with a time before which the token is not valid; it may lack them."""


class BadToken(Exception):
    """A token that lets no one in. The message says why and what helps, in printable ASCII without quotes."""


@dataclass(frozen=True, slots=True)
class TokenHeader:
    """The part of a token's header that chooses its key. ``key_id``: None: the header names no key."""

    algorithm: str
    key_id: str | None


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The claims that a token must have."""

    issuer: str
    audience: str
    client_claim: str


@dataclass(frozen=True, slots=True)
class GoodToken:
    """A token whose signature, issuer and audience are right. Times in Unix seconds, without leeway."""

    client: str
    """The client's name, with ``JWT_PREFIX`` before it."""
    not_before: float
    expires_at: float


def read_header(token: bytes) -> TokenHeader | None:
    """The header of a token; None: it is no JWT, but may be an API key.

    Raises:
        BadToken: It is a JWT of a form that is not taken.
    """
    parts = _PARTS.fullmatch(token)
    header = _object_in(parts[1]) if parts is not None else None
    if parts is None or header is None or "alg" not in header:
        return None
    if len(token) > MAX_TOKEN_BYTES:
        raise BadToken(f"the token has {len(token)} bytes, at most {MAX_TOKEN_BYTES} are taken: ask for one with less")
    if not _is_canonical(parts[3]):
        raise BadToken("the token has no signature in base64url: send it as the identity provider has made it")
    if "crit" in header:
        raise BadToken("the token has a critical extension (crit), and none is known here: ask for one without")
    key_id = header.get("kid")
    algorithm = header["alg"]
    told = algorithm if isinstance(algorithm, str) else _NO_TEXT
    return TokenHeader(told, key_id if isinstance(key_id, str) else None)


def _object_in(part: bytes) -> dict[str, Any] | None:
    """The JSON object in one part; None: there is none."""
    try:
        found = orjson.loads(urlsafe_b64decode(part + b"=" * (-len(part) % 4)))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _is_canonical(signature: bytes) -> bool:
    """Whether no other text stands for the same bytes: else a token could be altered, and still be let in."""
    try:
        raw = urlsafe_b64decode(signature + b"=" * (-len(signature) % 4))
    except ValueError:
        return False
    return bool(raw) and urlsafe_b64encode(raw).rstrip(b"=") == signature


def read_claims(payload: bytes, rules: TokenRules) -> GoodToken:
    """The token with this payload, whose signature was checked. Its times are not judged.

    Raises:
        BadToken: A claim is missing, or not as ``rules`` want it.
    """
    try:
        claims = orjson.loads(payload)
    except ValueError:
        claims = None
    if not isinstance(claims, dict):
        raise BadToken("the payload of the token is no JSON object: ask the identity provider for another token")
    _check_origin(claims, rules)
    expires_at = _seconds_in(claims, "exp")
    starts = [_seconds_in(claims, name) for name in _STARTS if name in claims]
    return GoodToken(_client_in(claims, rules.client_claim), max(starts, default=0.0), expires_at)


def _check_origin(claims: Mapping[str, Any], rules: TokenRules) -> None:
    if claims.get("iss") != rules.issuer:
        cure = "ask that issuer for a token, or see --jwt-issuer"
        raise BadToken(f"iss is {_shown(claims, 'iss')}, and {safe(rules.issuer)} is expected here: {cure}")
    told = claims.get("aud")
    if told != rules.audience and not (isinstance(told, list) and rules.audience in told):
        cure = "ask for a token for that audience, or see --jwt-audience"
        raise BadToken(f"aud is {_shown(claims, 'aud')}, and {safe(rules.audience)} is expected here: {cure}")


def _seconds_in(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST_S:
        cure = "ask the identity provider for a token that has it in Unix seconds"
        raise BadToken(f"{name} is {_shown(claims, name)}: {cure}")
    return float(value)


def _client_in(claims: Mapping[str, Any], name: str) -> str:
    """The client's name. A value that cannot be a name is not quoted: it may be anything."""
    value = claims.get(name)
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        want = f"1 to {MAX_NAME_CHARS} visible ASCII characters without blanks"
        told = "missing" if value is None else "no such text"
        raise BadToken(f"{safe(name)} names the client with {want}, and is {told}: see --jwt-client-claim")
    return JWT_PREFIX + value


def time_problem(token: GoodToken, now: float) -> str:
    """Why the token lets no one in now; empty: it does. ``now``: Unix seconds."""
    if now >= token.expires_at + LEEWAY_S:
        return f"exp is {token.expires_at:.0f}, and it is {now:.0f}: ask for a new token"
    if now < token.not_before - LEEWAY_S:
        return f"nbf or iat is {token.not_before:.0f}, and it is {now:.0f}: wait, or set the clocks"
    return ""


def _shown(claims: Mapping[str, Any], name: str) -> str:
    if name not in claims:
        return "missing"
    value = claims[name]
    try:
        return safe(value if isinstance(value, str) else orjson.dumps(value).decode())
    except orjson.JSONEncodeError:  # It is nested too deeply.
        return _NO_TEXT


def safe(text: str) -> str:
    """``text`` as errors may quote it: bounded, printable ASCII without quotes."""
    short = text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
    return _NOT_SHOWN.sub("?", short) or "empty"
