"""Whole answers to questions that are rare: to probes, for lists of models, for key sets. Bounded in bytes.

Their callers bound the wait.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pdcluster_router.http.connection import ResponseHead, ResponseLost


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole response."""

    head: ResponseHead
    body: bytes


class LostError(Exception):
    """There will be no whole answer. ``is_too_large``: it is longer than its collector takes."""

    def __init__(self, lost: ResponseLost, *, is_too_large: bool = False) -> None:
        super().__init__(lost.reason)
        self.lost = lost
        self.is_too_large = is_too_large


class Collector:
    """Waits for a whole response."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: an answer with a longer body is lost."""
        self.done: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self.is_sent = False
        """Whether a connection had the request, once it is over."""
        self._max_bytes = max_bytes
        self._head: ResponseHead | None = None
        self._body = bytearray()

    def on_head(self, head: ResponseHead) -> None:
        self._head = head

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > self._max_bytes and not self.done.done():
            lost = ResponseLost(f"the answer is larger than {self._max_bytes} bytes")
            self.done.set_exception(LostError(lost, is_too_large=True))

    def on_end(self) -> None:
        assert self._head is not None
        if not self.done.done():
            self.done.set_result(Fetched(self._head, bytes(self._body)))

    def on_lost(self, lost: ResponseLost) -> None:
        if not self.done.done():
            self.done.set_exception(LostError(lost))
