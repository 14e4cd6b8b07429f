"""Identity providers of routers that the API server refuses, and the message it must show."""

from __future__ import annotations

from typing import Any, Final

from operator_cases.objects import By, Refused

_URL: Final = "https://host/jwks"
_GIVE: Final = ": give one of keySetUrl and keySetSecretRef"


def _tokens(**more: Any) -> dict[str, Any]:
    return {"spec.router.tokens": {"issuer": "i", "audience": "a", **more}}


REFUSED_TOKENS: Final = (
    Refused("no key set", _tokens(), f"router.tokens has no keySetUrl and no keySetSecretRef{_GIVE}"),
    Refused(
        "two key sets",
        _tokens(keySetUrl=_URL, keySetSecretRef={"name": "keys"}),
        f"router.tokens has keySetUrl {_URL} and keySetSecretRef keys{_GIVE}",
    ),
    *(
        Refused(
            f"a key set {what}", _tokens(keySetUrl=url), "spec.router.tokens.keySetUrl in body should match", By.SCHEMA
        )
        for what, url in (
            ("in the clear", "http://host/jwks"),
            ("with a user", "https://user@host/jwks"),
            ("with a variable", "https://host/$(POD_IP)"),
            ("with a fragment", "https://host/#a"),
            ("with a port that none has", "https://host:65536/jwks"),
            ("with a host that none has", "https://host..example/jwks"),
        )
    ),
    Refused(
        "an issuer with a variable",
        _tokens(issuer="$(POD_IP)", keySetUrl=_URL),
        "spec.router.tokens.issuer in body should match",
        By.SCHEMA,
    ),
    Refused(
        "no audience",
        {"spec.router.tokens": {"issuer": "i", "keySetUrl": _URL}},
        "spec.router.tokens.audience: Required value",
        By.SCHEMA,
    ),
)
