"""The changes that make one head of another, for a gateway that has the head and is told what to set and remove.

And a gateway's name for an engine: an address with a port (Gateway API Inference Extension, proposal 004).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from pdcluster_router.core.apis.request_head import Headers

ENDPOINT_KEY: Final = "x-gateway-destination-endpoint"
"""Header and metadata by which a gateway learns the picked engine."""
ENDPOINT_SPACE: Final = "envoy.lb"
SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
SUBSET_SPACE: Final = "envoy.lb.subset_hint"

_GATEWAYS_OWN: Final = frozenset(
    (
        b"connection",
        b"content-length",
        b"date",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-connection",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Headers that the gateway writes by itself on each side."""


@dataclass(frozen=True, slots=True)
class HeaderChanges:
    """``set``: each name with all its values, in place of those that are there. ``remove``: names."""

    set: tuple[tuple[bytes, bytes], ...] = ()
    remove: tuple[bytes, ...] = ()

    def with_length(self, num_bytes: int) -> HeaderChanges:
        """The same changes, and the length of a body that is replaced."""
        return HeaderChanges((*self.set, (b"content-length", b"%d" % num_bytes)), self.remove)


NO_CHANGES: Final = HeaderChanges()


def changes_between(had: Headers, wanted: Headers) -> HeaderChanges:
    """The changes that make ``wanted`` of ``had``, both with names in lower case. Headers that the gateway writes by
    itself stay as they are."""
    before, after = _by_name(had), _by_name(wanted)
    new = tuple((name, value) for name, values in after.items() if before.get(name) != values for value in values)
    return HeaderChanges(new, tuple(name for name in before if name not in after))


def _by_name(headers: Headers) -> dict[bytes, list[bytes]]:
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if not _is_gateways(name):
            values.setdefault(name, []).append(value)
    return values


def _is_gateways(name: bytes) -> bool:
    return name in _GATEWAYS_OWN or name.startswith((b":", b"x-envoy-"))


def headers_in(lines: bytes) -> Headers:
    """Whole header lines as pairs. Names become lower case."""
    pairs = (line.partition(b":") for line in lines.split(b"\r\n") if line)
    return [(name.lower(), value.strip()) for name, _, value in pairs]


@lru_cache(maxsize=4096)
def endpoint_of(url: str) -> str:
    """A gateway's name for the engine with this URL, as ``10.0.0.1:8000`` or ``[fd00::1]:8000``; empty: it has a name
    and no address, so no gateway can be told it."""
    parts = urlsplit(url)
    try:
        address = ip_address(parts.hostname or "")
    except ValueError:
        return ""
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def endpoints_in(metadata: Mapping[str, object]) -> frozenset[str] | None:
    """The endpoints that may be picked, by the gateway's metadata for this request; None: it names none, so any may.

    A text with commas counts as a list: gateways that make it of a header write one (proposal 004 has a list).
    """
    space = metadata.get(SUBSET_SPACE)
    if not isinstance(space, Mapping) or SUBSET_KEY not in space:
        return None
    named = space[SUBSET_KEY]
    texts = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return frozenset(
        part.strip() for text in texts if isinstance(text, str) for part in text.split(",") if part.strip()
    )


def is_among(endpoint: str, endpoints: frozenset[str] | None) -> bool:
    """Whether a gateway may be told ``endpoint``. A name of ``endpoints`` without a port stands for all ports."""
    if not endpoint or endpoints is None:
        return bool(endpoint)
    return endpoint in endpoints or endpoint.rpartition(":")[0].strip("[]") in endpoints
