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
from pdcluster_router.core.clients.tokens.claims import safe

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
MAX_RSA_BITS: Final = 4096
"""Providers have 2048 to 4096. A token with a bad signature costs a check each time it is shown; with 8192 bits a check
costs four times as much as with 4096."""
_MIN_RSA_BITS: Final = 2048
"""Smaller ones can be broken."""
_MAX_EXPONENT_BITS: Final = 33
_PUBLIC: Final = ("kty", "crv", "n", "e", "x", "y")


@dataclass(frozen=True, slots=True)
class PublicJwk:
    """One key that may sign tokens. ``members``: its public members alone."""

    key_id: str | None
    algorithms: frozenset[str]
    members: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ReadKeys:
    """The keys of one document that may sign tokens. ``too_large``: for each RSA key above ``MAX_RSA_BITS``, which one
    it is and how many bits it has."""

    keys: tuple[PublicJwk, ...]
    too_large: tuple[str, ...]


def keys_in(document: bytes) -> ReadKeys:
    """The keys of a document.

    Raises:
        ConfigError: It is no key set, or none of its keys may sign tokens, or it is too large.
    """
    keys = _told_in(document)
    found = tuple(key for key in map(_key_in, keys) if key is not None)
    too_large = tuple(words for words in map(_too_large, keys) if words)
    if found:
        return ReadKeys(found, too_large)
    want = f"RSA with {_MIN_RSA_BITS} to {MAX_RSA_BITS} bits, P-256, P-384, P-521, Ed25519 or Ed448, for signatures"
    but = f" ({too_large[0]})" if too_large else ""
    raise ConfigError(f"of its {len(keys)} keys none can be used{but}: name one with public keys ({want})")


def _told_in(document: bytes) -> list[object]:
    """The keys as the document has them."""
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
    return keys


def _too_large(told: object) -> str:
    """The name and the bits of an RSA key that is too large; empty: it is no such key."""
    if not isinstance(told, dict) or not _is_for_signatures(told) or told.get("kty") != "RSA":
        return ""
    number, key_id, algorithm = told.get("n"), told.get("kid"), told.get("alg", "RS256")
    num_bits = _bits_of(number) if isinstance(number, str) else 0
    if num_bits <= MAX_RSA_BITS or not isinstance(algorithm, str) or algorithm not in _RSA:
        return ""
    return f"kid={safe(key_id) if isinstance(key_id, str) else 'none'} bits={num_bits}"


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
        has_size = _MIN_RSA_BITS <= _bits_of(members.get("n", "")) <= MAX_RSA_BITS
        return _RSA if has_size and 1 < _bits_of(members.get("e", "")) <= _MAX_EXPONENT_BITS else frozenset()
    return _CURVES.get((members.get("kty", ""), members.get("crv", "")), frozenset())


def _bits_of(number: str) -> int:
    """How many bits a number in base64url has; 0: it is none."""
    try:
        return int.from_bytes(urlsafe_b64decode(number + "=" * (-len(number) % 4))).bit_length()
    except ValueError:
        return 0
