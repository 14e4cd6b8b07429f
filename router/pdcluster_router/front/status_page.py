"""``GET /status``, a page for browsers, and ``GET /pdcluster/status``, the document that it draws.

The page is the same for everybody: no byte of a request, a key or an engine is in it. Its script puts words into text
nodes only. Its Content-Security-Policy allows this script and this style, calls to its own origin, and nothing else.
"""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from pdcluster_protocol.kept import KeptRequest
from pdcluster_protocol.status_page import StatusPage
from pdcluster_router.core.telemetry.recent_requests import recent_request
from pdcluster_router.front.engines_page import describe_pool
from pdcluster_router.front.requests_page import with_its_alias, with_lines
from pdcluster_router.services import Services
from pdcluster_router.telemetry.kept import Fate

NUM_RECENT: Final = {Fate.FAILED: 12, Fate.SERVED: 12, Fate.REFUSED: 6}
"""Requests of each fate in the document: as many as a screen shows."""


MAX_AHEAD: Final = 64
"""How many of the requests that were ahead of one in the queue are told by key: 10 us for each row. ``why`` looks at
all that are remembered."""


def describe_status(services: Services) -> bytes:
    """The document, JSON. Costs a look at every engine, and 30 us for each request: 0.8 ms in all."""
    now_unix_s = services.unix_now()
    found = [(request, fate) for fate, num in NUM_RECENT.items() for request in services.kept.newest(fate, num)]
    found.sort(key=lambda one: -(one[0].ended_at_unix_s or 0.0))
    told = [(_with_queue_and_alias(services, request), fate) for request, fate in found]
    recent = tuple(recent_request(one, fate.value, now_unix_s=now_unix_s) for one, fate in told)
    return msgspec.json.encode(StatusPage(pool=describe_pool(services), recent=recent))


def _with_queue_and_alias(services: Services, request: KeptRequest) -> KeptRequest:
    return with_its_alias(services, with_lines(services, request, MAX_AHEAD))


def _read(name: str) -> str:
    return (Path(__file__).with_name("status") / name).read_text()


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


_STYLE, _SCRIPT = _read("page.css"), _read("page.js")
PAGE: Final = _read("page.html").replace("{style}", _STYLE).replace("{script}", _SCRIPT).encode()
PAGE_HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": (
        f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
DOCUMENT_HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
