"""``GET /pdcluster/status`` on a router's internal port: its pool, and the steps of its last requests.

For the page ``/status`` and ``pdcluster top``. A reader ignores fields that it does not know.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdcluster_protocol.pool_page import PoolPage

STATUS_PATH: Final = "/pdcluster/status"
STATUS_PAGE_PATH: Final = "/status"
"""The page for a browser, which asks ``STATUS_PATH``."""


class StepRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step of a request: it lasts until the next one."""

    kind: str
    took_s: float
    text: str
    """Words for a person, with engine and attempt."""


class RecentRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that has ended. Its client chose some of the texts, such as ``request_id`` and ``model``."""

    request_id: str
    ended_s: float
    """Seconds since its end."""
    fate: str
    """``served``, ``refused`` or ``failed``."""
    client: str = ""
    """As in the access log."""
    model: str = ""
    alias_of: str = ""
    """As in ``KeptRequest``."""
    path: str = ""
    status: int | None = None
    outcome: str = ""
    """A value of the label ``outcome`` of ``pdcluster_router_requests_total``."""
    error: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    read_s: float | None = None
    """From its first byte to its last one, before its arrival."""
    first_byte_s: float | None = None
    """From its arrival to decode's first byte."""
    total_s: float | None = None
    """From its arrival to the end of its answer."""
    steps: tuple[StepRow, ...] = ()
    """From its first byte to its end. They add up to the time between these two."""


class StatusPage(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document."""

    pool: PoolPage
    recent: tuple[RecentRequest, ...]
    """The newest first."""
