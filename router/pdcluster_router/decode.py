"""The decode leg of one request: which engine, the request to it, and again elsewhere while it is surely unsent.

What comes back goes to the ``Relay``; this file never reads it.
"""

from __future__ import annotations

from pdcluster_protocol.params import DecodeParams
from pdcluster_router.connection import Call, Lost, ResponseSink
from pdcluster_router.core.rewrite import ClientBody
from pdcluster_router.engine import Engine, Role
from pdcluster_router.services import Services


class DecodeLeg:
    """Owned by its exchange. ``close`` gives back the call and the engine."""

    __slots__ = ("_body", "_call", "_fresh", "_headers", "_num_tokens", "_path", "_services", "_tried", "engine")

    def __init__(self, services: Services, path: bytes, headers: bytes, body: ClientBody) -> None:
        self.engine: Engine | None = None
        self._services = services
        self._path = path
        self._headers = headers
        self._body = body
        self._num_tokens = body.estimated_tokens
        self._call: Call | None = None
        self._tried: list[Engine] = []
        self._fresh = False

    def place(self) -> bool:
        """Whether there is an engine to send to: the one that is placed, or the next that was not tried."""
        if self.engine is None:
            self.engine = self._services.place(Role.DECODE, self._tried)
            if self.engine is not None:
                self.engine.take(self._num_tokens)
        return self.engine is not None

    def send(self, params: DecodeParams | None, sink: ResponseSink) -> Call:
        """The request is on its way to the placed engine. None: decode prefills by itself.

        Raises:
            BadBody: The client's body cannot be written as JSON again.
        """
        assert self.engine is not None
        body = self._body.for_decode(params)
        self._call = self.engine.post(self._path, self._headers, body, sink, fresh=self._fresh)
        return self._call

    def may_send_again(self, lost: Lost) -> bool:
        """Whether the request surely never reached an engine. If so it is ready to be placed again."""
        if lost.is_unsent:
            assert self.engine is not None
            self._tried.append(self.engine)
            self.close()
            return True
        is_first_time = not self._fresh
        self._fresh = True
        return lost.is_stale and is_first_time

    def close(self) -> None:
        """The engine aborts the request if it still runs; the engine no longer counts it."""
        if self._call is not None:
            self._call.close()
            self._call = None
        if self.engine is not None:
            self.engine.give_back(self._num_tokens)
            self.engine = None
