"""Tokens with a right signature and right claims: one that comes again costs no check of its signature. Bounded.

Known by the SHA-256 of the token: no token stays in memory. Their times are judged at each request all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from pdcluster_router.core.clients.tokens.claims import GoodToken

MAX_KNOWN: Final = 10_000
"""Some 4 MB. A client shows one token for minutes to hours."""


class KnownTokens:
    """One owner."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        """``most``: above it the token that was not shown for the longest time is forgotten."""
        self._most = most
        self._tokens: OrderedDict[bytes, GoodToken] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, digest: bytes) -> GoodToken | None:
        """The token with this digest; None: it is not known."""
        token = self._tokens.get(digest)
        if token is not None:
            self._tokens.move_to_end(digest)
        return token

    def keep(self, digest: bytes, token: GoodToken) -> None:
        """The token's signature and claims were checked."""
        self._tokens[digest] = token
        if len(self._tokens) > self._most:
            self._tokens.popitem(last=False)

    def clear(self) -> None:
        """The keys have changed: each token is checked anew."""
        self._tokens.clear()
