"""Which settings for tokens belong together, and where a key set may be."""

from __future__ import annotations

from typing import Any, Final

import pytest

from fakes.identity import RULES
from pdcluster_protocol.errors import ConfigError
from pdcluster_router.settings.router_settings import Settings, build_settings
from pdcluster_router.settings.token_settings import is_url


def built(**changes: Any) -> Settings:
    return build_settings(prefill_urls=("http://p:1",), decode_urls=("http://d:1",), **changes)


PLACES: Final = (
    "keys.json",
    "/etc/keys",
    "https://host/jwks?x=1",
    "http://127.0.0.1:5/k",
    "http://localhost/",
    "http://[::1]/",
)


@pytest.mark.parametrize("place", PLACES)
def test_a_key_set_is_in_a_file_or_at_a_url_that_no_one_can_forge(place: str) -> None:
    settings = built(jwt_key_set=place, **RULES)
    assert settings.jwt_key_set == place
    assert is_url(place) is place.startswith("http")
    assert settings.jwt_client_claim == "sub"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("http://host/jwks", "give an https:// URL"),
        ("ftp://host/jwks", "no file and no URL"),
        ("https:///jwks", "no file and no URL"),
        ("https://user:secret@host/jwks", "it has a user"),
        ("https://host/a b", "characters that no URL has"),
        ("https://host/\r\nx: y", "characters that no URL has"),
        ("https://host/#a", "a fragment"),
        ("", "at least 1 character"),
    ],
)
def test_another_place_is_refused_with_the_cure(place: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        built(jwt_key_set=place, **RULES)
    assert str(refused.value).startswith("--jwt-key-set")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"jwt_key_set": "f"},
            "--jwt-issuer and --jwt-audience: --jwt-key-set needs it, give the value that tokens have",
        ),
        ({"jwt_key_set": "f", "jwt_issuer": "i"}, "--jwt-audience: --jwt-key-set needs it"),
        ({"jwt_issuer": "i"}, "--jwt-issuer: give --jwt-key-set with it"),
    ],
)
def test_a_key_set_needs_an_issuer_and_an_audience(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        built(**given)
