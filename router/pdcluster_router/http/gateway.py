"""A gateway in the place of a connection: it carries the bytes between its client and a decode engine, and the router
decides (``front/picker``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdcluster_router.core.apis.rewrite import Parts
from pdcluster_router.http.connection import Call, ResponseSink


class Gateway(Protocol):
    """The gateway of one request. ``front/picker/stream.py`` has the only implementation."""

    endpoints: frozenset[str] | None
    """The engines that may get the request, as the gateway calls them; None: any of its pool."""

    @property
    def carries_answer(self) -> bool:
        """Whether the answer's bytes come to the router, and go to the client from here."""
        ...

    def post(self, url: str, headers: bytes, body: Parts, sink: ResponseSink) -> Call:
        """The gateway sends the request to the engine with this URL, and tells ``sink`` of the answer. Once only.
        ``headers``: whole lines."""
        ...


class GatewayCall(Call):
    """A call that a gateway makes. Owned by its sender, as any call."""

    __slots__ = ("_may_read",)

    def __init__(self, sink: ResponseSink, may_read: Callable[[bool], None]) -> None:
        """``may_read``: called with False where the gateway shall be read no further for now, and with True again."""
        super().__init__(sink)
        self._may_read = may_read

    def close(self) -> None:
        """The sink hears nothing more. The gateway hangs up on the engine when its client has an error, or has left."""
        self.is_closed = True
        self._may_read(True)

    def pause(self) -> None:
        self._may_read(False)

    def resume(self) -> None:
        self._may_read(True)
