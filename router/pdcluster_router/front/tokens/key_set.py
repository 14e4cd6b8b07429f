"""The public keys of an identity provider, and the check of a token's signature. PyJWT does both.

Imports PyJWT and ``cryptography``, of ``pdcluster[jwt]``: ``start.py`` says when.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.clients.tokens.claims import BadToken, TokenHeader, safe
from pdcluster_router.core.clients.tokens.jwks import ALGORITHMS, PublicJwk, keys_in

_MOST_TRIED: Final = 3
"""Keys of one name. A provider that renews a key may give the new one the old name for a while."""


class UnknownKeyError(BadToken):
    """No key is known by which the token could be signed. A newer key set may have it."""


class KeySet:
    """The keys of one document."""

    def __init__(self, document: bytes) -> None:
        """Raises: ConfigError: The document is no key set, or none of its keys can be used."""
        read = keys_in(document)
        self.too_large: Final = read.too_large
        """The RSA keys that are not taken, each with its bits."""
        made = [(key, _made(key)) for key in read.keys]
        self._keys: Final = [(key, public) for key, public in made if public is not None]
        if not self._keys:
            raise ConfigError(f"of its {len(made)} keys none can be read: name the key set of the identity provider")
        self._jws = jwt.PyJWS(sorted(ALGORITHMS))

    def __len__(self) -> int:
        return len(self._keys)

    def has_those_of(self, other: KeySet) -> bool:
        """Whether the two have the same keys, in any order."""
        return _as_set(self._keys) == _as_set(other._keys)

    def payload_of(self, token: bytes, header: TokenHeader) -> bytes:
        """The payload of a token, if one of these keys has signed it. ``header``: that of ``token``.

        Raises:
            BadToken: None of these keys has signed it.
        """
        if header.algorithm not in ALGORITHMS:
            want = "one that is signed with a private key, as by RS256, ES256 or EdDSA"
            raise BadToken(f"alg is {safe(header.algorithm)}, which is not taken: ask for {want}")
        for public in self._keys_for(header):
            try:
                payload: bytes = self._jws.decode(token, public.key, algorithms=[header.algorithm])
            except (jwt.PyJWTError, UnsupportedAlgorithm, ValueError, RecursionError):
                continue
            return payload
        raise BadToken("the signature of the token is not of the key that it names: ask for a new token")

    def _keys_for(self, header: TokenHeader) -> list[jwt.PyJWK]:
        """The keys that the header names, ``_MOST_TRIED`` at most; else those without a name. A token that names none
        may only be of the one key that there is."""
        if header.key_id is None and len(self._keys) > 1:
            raise BadToken(f"the token names no key (kid), and there are {len(self._keys)}: ask for one that does")
        named = [one for one in self._keys if header.key_id in (None, one[0].key_id)]
        named = named or [one for one in self._keys if one[0].key_id is None]
        if not named:
            told = f"kid is {safe(header.key_id or '')}, and none of the {len(self._keys)} known keys has it"
            raise UnknownKeyError(f"{told}: ask for a new token; the keys are read again within seconds")
        fitting = [public for key, public in named if header.algorithm in key.algorithms]
        if not fitting:
            can = safe(", ".join(sorted(named[0][0].algorithms)))
            raise BadToken(f"alg is {safe(header.algorithm)}, and the key signs by {can}: ask for a new token")
        return fitting[:_MOST_TRIED]


def _as_set(keys: Iterable[tuple[PublicJwk, jwt.PyJWK]]) -> set[tuple[object, ...]]:
    return {(key.key_id, key.algorithms, *sorted(key.members.items())) for key, _ in keys}


def _made(key: PublicJwk) -> jwt.PyJWK | None:
    """PyJWT's form of the key; None: its numbers are no key, such as a point beside its curve."""
    try:
        return jwt.PyJWK(dict(key.members), algorithm=min(key.algorithms))
    except (jwt.PyJWTError, UnsupportedAlgorithm, ValueError, TypeError):
        return None
