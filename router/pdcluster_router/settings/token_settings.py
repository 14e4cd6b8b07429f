"""The router's settings for tokens of an identity provider: each with its unit, default, bounds, and why that default.

A part of ``Settings``.
"""

from __future__ import annotations

from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from pdcluster_protocol.secret import is_loopback

_HTTPS: Final = "https://"


def is_url(key_set: str) -> bool:
    """Whether the key set is at a URL, and not in a file."""
    return "://" in key_set


def _checked_place(key_set: str) -> str:
    if not is_url(key_set):
        return key_set
    parts = urlsplit(key_set)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{key_set.split('@')[-1]!r} is no file and no URL like https://HOST/jwks")
    is_plain = key_set.isascii() and key_set.isprintable() and " " not in key_set
    if "@" in parts.netloc or parts.fragment or not is_plain:
        raise ValueError("it has a user, a fragment or characters that no URL has: give https://HOST/PATH")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(f"{key_set!r} would be read in the clear, and could be forged: give an https:// URL")
    return key_set


KeySetPlace = Annotated[str, Field(min_length=1), AfterValidator(_checked_place)]


class TokenSettings(BaseModel):
    """Clients that show tokens (JWT) of an identity provider."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    jwt_key_set: KeySetPlace | None = None
    """The public keys by which an identity provider signs clients' tokens: a file with its key set (JWKS), read again
    when it changes, or the https:// URL of it, as https://HOST/jwks. Plain http on loopback only. Clients then need a
    token, or a key of --api-key-file. Needs the packages of pdcluster[jwt]. None: tokens are not read."""
    jwt_issuer: str | None = Field(default=None, min_length=1)
    """The provider's name: the claim ``iss`` of each token, exactly. Needed with --jwt-key-set."""
    jwt_audience: str | None = Field(default=None, min_length=1)
    """The name that the provider has for this service: one of the claim ``aud`` of each token. Needed with
    --jwt-key-set, for a provider signs tokens for other services too."""
    jwt_client_claim: str = Field(default="sub", min_length=1)
    """The claim with the client's name: of 1 to 128 visible ASCII characters. sub: each token for a person or a program
    has it."""
    jwt_interval_s: float = Field(default=300.0, gt=0, le=86400)
    """Seconds between two looks at the URL of --jwt-key-set. 300: a provider shows a new key for hours before it signs
    with it, and a token of a key that is not known brings the next look forward. A file is looked at as that of API
    keys."""

    @model_validator(mode="after")
    def _has_whole_rules(self) -> Self:
        rules = {"--jwt-issuer": self.jwt_issuer, "--jwt-audience": self.jwt_audience}
        if self.jwt_key_set is None:
            if given := [flag for flag, value in rules.items() if value is not None]:
                raise ValueError(f"{' and '.join(given)}: give --jwt-key-set with it, or leave it out")
        elif missing := [flag for flag, value in rules.items() if value is None]:
            raise ValueError(f"{' and '.join(missing)}: --jwt-key-set needs it, give the value that tokens have")
        return self
