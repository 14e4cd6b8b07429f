"""Reads an identity provider's key set (JWKS, RFC 7517): the keys that may sign tokens, and by which algorithms.

Only public keys of asymmetric algorithms count. A key of another kind or use is left out, as the standard says: a
provider may add new kinds beside those that are known here.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from pdcluster_protocol.errors import ConfigError

MAX_DOCUMENT_BYTES: Final = 1 << 20
MAX_SET_KEYS: Final = 1000
"""Providers have two to ten."""
_RSA: Final = frozenset(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"))
_CURVES: Final = {
    ("EC", "P-256"): frozenset(("ES256",)),
    ("EC", "P-384"): frozenset(("ES384",)),
    ("EC", "P-521"): frozenset(("ES512",)),
    ("OKP", "Ed25519"): frozenset(("EdDSA",)),
    ("OKP", "Ed448"): frozenset(("EdDSA",)),
}
"""By the kind of a key and its curve: the algorithms that it may sign with."""
ALGORITHMS: Final = _RSA.union(*_CURVES.values())
"""All that are taken: no ``none``, and none with a shared secret."""
_RSA_BITS: Final = range(2048, 8193)
"""Smaller ones can be broken; larger ones would make each check slow."""
_MAX_EXPONENT_BITS: Final = 33
_PUBLIC: Final = ("kty", "crv", "n", "e", "x", "y")


@dataclass(frozen=True, slots=True)
class PublicJwk:
    """One key that may sign tokens. ``members``: its public members alone."""

    key_id: str | None
    algorithms: frozenset[str]
    members: Mapping[str, str]


def keys_in(document: bytes) -> list[PublicJwk]:
    """The keys of a document that may sign tokens.

    Raises:
        ConfigError: It is no key set, or none of its keys may sign tokens, or it is too large.
    """
    if len(document) > MAX_DOCUMENT_BYTES:
        raise ConfigError(f"it is larger than {MAX_DOCUMENT_BYTES} bytes: name a key set (JWKS)")
    try:
        told = orjson.loads(document)
    except ValueError:
        told = None
    keys = told.get("keys") if isinstance(told, dict) else None
    if not isinstance(keys, list):
        raise ConfigError("it is no key set: name a JSON document with a list of keys (JWKS)")
    if len(keys) > MAX_SET_KEYS:
        raise ConfigError(f"it has {len(keys)} keys, at most {MAX_SET_KEYS} are taken: name a smaller key set")
    found = [key for key in map(_key_in, keys) if key is not None]
    if not found:
        want = "RSA with 2048 bits or more, P-256, P-384, P-521, Ed25519 or Ed448, for signatures"
        raise ConfigError(f"of its {len(keys)} keys none can be used: name one with public keys ({want})")
    return found


def _key_in(told: object) -> PublicJwk | None:
    """The key; None: it may sign no tokens here."""
    if not isinstance(told, dict) or not _is_for_signatures(told):
        return None
    members = {name: told[name] for name in _PUBLIC if isinstance(told.get(name), str)}
    algorithms = _algorithms_of(members)
    if "alg" in told:
        algorithms &= {told["alg"]} if isinstance(told["alg"], str) else frozenset()
    key_id = told.get("kid")
    return PublicJwk(key_id if isinstance(key_id, str) else None, algorithms, members) if algorithms else None


def _is_for_signatures(told: Mapping[str, Any]) -> bool:
    uses = told.get("key_ops")
    return told.get("use", "sig") == "sig" and (not isinstance(uses, list) or "verify" in uses)


def _algorithms_of(members: Mapping[str, str]) -> frozenset[str]:
    if members.get("kty") == "RSA":
        is_sound = (
            _bits_of(members.get("n", "")) in _RSA_BITS and 1 < _bits_of(members.get("e", "")) <= _MAX_EXPONENT_BITS
        )
        return _RSA if is_sound else frozenset()
    return _CURVES.get((members.get("kty", ""), members.get("crv", "")), frozenset())


def _bits_of(number: str) -> int:
    """How many bits a number in base64url has; 0: it is none."""
    try:
        return int.from_bytes(urlsafe_b64decode(number + "=" * (-len(number) % 4))).bit_length()
    except ValueError:
        return 0
