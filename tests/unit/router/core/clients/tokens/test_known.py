"""How many tokens are remembered, and which is forgotten first."""

from __future__ import annotations

from pdcluster_router.core.clients.tokens.claims import GoodToken
from pdcluster_router.core.clients.tokens.known import KnownTokens


def good(client: str) -> GoodToken:
    return GoodToken(client, 0.0, 1.0)


def test_the_token_that_was_not_shown_for_the_longest_time_is_forgotten_first() -> None:
    known = KnownTokens(most=2)
    known.keep(b"a", good("a"))
    known.keep(b"b", good("b"))
    assert known.find(b"a") == good("a")
    known.keep(b"c", good("c"))
    assert (known.find(b"a"), known.find(b"b"), known.find(b"c")) == (good("a"), None, good("c"))
    known.keep(b"c", good("c"))
    assert len(known) == 2


def test_all_tokens_can_be_forgotten() -> None:
    known = KnownTokens()
    known.keep(b"b", good("b"))
    known.clear()
    assert known.find(b"b") is None
