"""The decode leg of one request: which engine, the request to it, and again elsewhere.

What comes back goes to the ``Relay``; this file never reads it.
"""

from __future__ import annotations

from pdcluster_protocol.params import DecodeParams
from pdcluster_router.connection import Call, Lost, ResponseSink
from pdcluster_router.core.membership import State
from pdcluster_router.engine import Engine
from pdcluster_router.request import ClientRequest


class DecodeLeg:
    """Owned by its exchange. ``close`` gives back the call and the engine."""

    __slots__ = ("_call", "_fresh", "_num_tokens", "_request", "_tried", "engine")

    def __init__(self, request: ClientRequest) -> None:
        self.engine: Engine | None = None
        self._request = request
        self._num_tokens = request.body.estimated_tokens
        self._call: Call | None = None
        self._tried: list[Engine] = []
        self._fresh = False

    @property
    def name(self) -> str:
        """Who has the request; empty when nobody does."""
        return self.engine.name if self.engine is not None else ""

    @property
    def revision(self) -> str:
        """Of the engine that has the request. Only while one does."""
        assert self.engine is not None
        return self.engine.revision

    def place(self) -> bool:
        """Whether there is an engine to send to: the one that is placed, or the next that was not tried."""
        if self.engine is None:
            self.engine = self._request.terms.place_decode(self._tried)
            if self.engine is not None:
                self.engine.take(self._num_tokens)
        return self.engine is not None

    def send(self, params: DecodeParams | None, sink: ResponseSink) -> Call:
        """The request is on its way to the placed engine. None: decode prefills by itself.

        Raises:
            BadBody: The client's body cannot be written as JSON again.
        """
        assert self.engine is not None
        body = self._request.body.for_decode(params)
        self._call = self.engine.post(self._request.path, self._request.headers, body, sink, fresh=self._fresh)
        return self._call

    def may_send_again(self, lost: Lost) -> bool:
        """Whether the request surely never reached an engine. If so it is ready to be placed again."""
        if lost.is_unsent or (lost.is_stale and not self._may_get_work()):
            self.leave()
            return True
        is_first_time = not self._fresh
        self._fresh = True
        return lost.is_stale and is_first_time

    def _may_get_work(self) -> bool:
        """Whether the engine still takes requests that it has not seen: it may have begun to terminate meanwhile."""
        return self.engine is not None and self.engine.state is State.SERVING

    def leave(self) -> None:
        """This engine is not asked again for this request; another one may be."""
        if self.engine is not None:
            self._tried.append(self.engine)
        self._fresh = False
        self.close()

    def close(self) -> None:
        """The engine aborts the request if it still runs; the engine no longer counts it."""
        if self._call is not None:
            self._call.close()
            self._call = None
        if self.engine is not None:
            self.engine.give_back(self._num_tokens)
            self.engine = None
