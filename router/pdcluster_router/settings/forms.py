"""The forms of single settings: URLs, names, lists, and words to choose from. ``router_settings.py`` has the settings.

A value that has not the form is refused with a message that says the right one.
"""

from __future__ import annotations

import unicodedata
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from pdcluster_kube.access import checked_api_url
from pdcluster_protocol.networks import parse_network


@lru_cache(maxsize=4096)
def checked_url(url: str) -> str:
    """The base URL of an engine, without a slash at its end. Raises: ValueError: It is none, or has more."""
    parts = urlsplit(url)
    if "[" not in parts.netloc and parts.netloc.count(":") > 1:
        # A pod's own address, where pods have IPv6 first: the engines would refuse it too.
        raise ValueError(
            f"{url!r} has an IPv6 address without brackets: write [ADDRESS]; decode engines call IPv4 only, so on "
            "Kubernetes give pods IPv4 addresses, or both with IPv4 first"
        )
    if (
        parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    ):  # .port raises when it is no number
        raise ValueError(f"{url!r} is not a URL like http://HOST:PORT")
    try:
        parts.hostname.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{url!r} has no host name: its labels must have 1 to 63 characters") from error
    if parts.path.rstrip("/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{url!r} has more than a host and a port: give http://HOST:PORT only")
    return f"{parts.scheme}://{parts.netloc}"


def listed(value: object) -> object:
    """The parts of one or several words, split at commas."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        return value
    return [part.strip() for word in words for part in str(word).split(",")]


def check_pair(cert_flag: str, cert: Path | None, key_flag: str, key: Path | None, otherwise: str) -> None:
    """Raises: ValueError: Only one of the two files is given."""
    if (cert is None) != (key is None):
        told = " and ".join(f"{flag} is {path or 'not given'}" for flag, path in ((cert_flag, cert), (key_flag, key)))
        raise ValueError(f"{told}: give both files, or neither {otherwise}")


def _is_shown(character: str) -> bool:
    """No control, no format, no blank but the space. What Unicode has not assigned yet may be shown one day."""
    category = unicodedata.category(character)
    return character == " " or category == "Cn" or category[0] not in "CZ"


def _checked_alias(text: str) -> str:
    name, _, model = (part.strip() for part in text.partition("="))
    if not name or not model or not all(map(_is_shown, text)):
        raise ValueError(f"{text!r} names no alias: write NAME=MODEL, as gpt-4=llama-3-70b")
    return f"{name}={model}"


ModelAlias = Annotated[str, AfterValidator(_checked_alias)]
EngineUrl = Annotated[str, AfterValidator(checked_url)]
ApiUrl = Annotated[str, AfterValidator(checked_api_url)]
ProxyNetwork = Annotated[str, AfterValidator(lambda text: str(parse_network(text)))]
_LABEL: Final = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
DnsName = Annotated[str, Field(pattern=rf"^{_LABEL}(\.{_LABEL})*$", max_length=253)]


class Discovery(Enum):
    """How a router learns of its engines."""

    STATIC = "static"
    """Settings name them."""
    KUBERNETES = "kubernetes"
    """From the EndpointSlices of one PDCluster, for as long as it runs."""
    FILE = "file"
    """From a file that may change while the router runs."""


class EngineDialect(Enum):
    """How a router speaks to its engines."""

    PDCLUSTER = "pdcluster"
    """They run our connector."""
    VLLM_ASCEND = "vllm-ascend"
    """They run vllm-ascend's own ``MooncakeLayerwiseConnector``, as released."""


class UnknownModels(Enum):
    """The answer to a request for a model that no engine lists."""

    REFUSE = "refuse"
    ASK = "ask"
