"""Checks the tokens that clients show, by the keys of one identity provider.

    NO KEYS --take()--> KEYS --take() of other keys--> KEYS, and every token is checked anew
       +--every token: 503, for it may be good

``key_server.py`` and the watch of a file bring the keys. A token that was let in costs no check of its signature again;
its times are judged at each request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import sha256
from typing import Final

from pdcluster_router.core.apis.openai_errors import ApiError, bad_token, no_token_keys
from pdcluster_router.core.clients.tokens.claims import (
    BadToken,
    GoodToken,
    TokenRules,
    read_claims,
    read_header,
    time_problem,
)
from pdcluster_router.core.clients.tokens.jwks import MAX_RSA_BITS
from pdcluster_router.core.clients.tokens.known import KnownTokens
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.front.tokens.key_set import KeySet, UnknownKeyError

logger = logging.getLogger(__name__)
_TOO_LARGE: Final = "token keys not taken: too large keys=%d first: %s: sign with RSA of %d bits at most, or with ES256"


class TokenCheck:
    """The check of one router. Event loop only."""

    def __init__(self, rules: TokenRules, unix_now: Callable[[], float]) -> None:
        """``unix_now``: seconds since 1970."""
        self.rules: Final = rules
        self.watch: FileWatch | None = None
        """None: the keys come from a URL."""
        self.url: str = ""
        """Where the keys come from; empty: from a file."""
        self.on_change: Callable[[], None] = _does_nothing
        """Called when there are other keys."""
        self.on_unknown_key: Callable[[], None] = _does_nothing
        """Called when a token names a key that is not known."""
        self._unix_now = unix_now
        self.read_at = unix_now()
        """When a key set was last read well, Unix seconds; before the first one: when the check was made."""
        self._keys: KeySet | None = None
        self._document = b""
        self._known = KnownTokens()

    @property
    def problem(self) -> str:
        """Why no token can be checked; empty: there are keys."""
        return "" if self._keys is not None else f"the keys of {self.rules.issuer} are not known yet: see --jwt-key-set"

    def take(self, document: bytes) -> None:
        """The keys of this document count from now on, and no others.

        Raises:
            ConfigError: It is no key set, or none of its keys can be used; the old keys stay.
        """
        if document == self._document:
            self.read_at = self._unix_now()
            return
        before, keys = self._keys, KeySet(document)
        self._keys, self._document, self.read_at = keys, document, self._unix_now()
        if keys.too_large and (before is None or set(keys.too_large) != set(before.too_large)):
            logger.warning(_TOO_LARGE, len(keys.too_large), keys.too_large[0], MAX_RSA_BITS)
        if before is not None and keys.has_those_of(before):
            return  # In another order, or with other members: each known token stays good.
        self._known.clear()
        self.on_change()
        if self.url or before is not None:
            logger.info("token keys changed keys=%d", len(keys))

    def age_s(self) -> float:
        """Seconds since a key set was last read well."""
        return max(0.0, self._unix_now() - self.read_at)

    def admit(self, token: bytes) -> str | ApiError | None:
        """The name of the token's client, or the error for the client; None: ``token`` is no token."""
        digest = sha256(token).digest()
        good = self._known.find(digest)
        if good is None:
            checked = self._checked(token)
            if not isinstance(checked, GoodToken):
                return checked
            self._known.keep(digest, good := checked)
        problem = time_problem(good, self._unix_now())
        return bad_token(problem) if problem else good.client

    def _checked(self, token: bytes) -> GoodToken | ApiError | None:
        """The token, its times not judged; the error for the client; or None: it is no token."""
        try:
            header = read_header(token)
            if header is None:
                return None
            if self._keys is None:
                return no_token_keys(self.rules.issuer)
            return read_claims(self._keys.payload_of(token, header), self.rules)
        except UnknownKeyError as error:
            self.on_unknown_key()
            return bad_token(str(error))
        except BadToken as error:
            return bad_token(str(error))


def _does_nothing() -> None:
    """The first ``on_change`` and ``on_unknown_key``."""
