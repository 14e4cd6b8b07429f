"""The decode leg of one request: which engine, the request to it, and again elsewhere.

What comes back goes to the ``Relay``; this file never reads it.
"""

from __future__ import annotations

from typing import Final

from pdcluster_protocol.params import DecodeParams
from pdcluster_router.blame import Suspects
from pdcluster_router.connection import Call, Lost, ResponseSink
from pdcluster_router.core.breaker import Blame, Era
from pdcluster_router.core.membership import State
from pdcluster_router.engine import Engine
from pdcluster_router.request import ClientRequest

_UNKNOWN: Final = frozenset((401, 403, 404))
"""Key or model is unknown: to all engines alike, or one of them was started otherwise."""


class DecodeLeg:
    """Owned by its exchange. ``close`` gives back the call and the engine."""

    __slots__ = (
        "_call",
        "_era",
        "_fresh",
        "_num_asked",
        "_num_prompt_tokens",
        "_num_tokens",
        "_suspects",
        "_tried",
        "engine",
        "request",
    )

    def __init__(self, request: ClientRequest, num_answer_tokens: int) -> None:
        """``num_answer_tokens``: about how many there will be."""
        self.engine: Engine | None = None
        self.request = request
        self._num_prompt_tokens = request.body.estimated_prompt_tokens
        self._num_tokens = self._num_prompt_tokens + num_answer_tokens
        self._era = Era(0)
        self._num_asked = 0
        self._suspects: Suspects | None = None
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
            self.engine = self.request.terms.place_decode(self._tried)
            if self.engine is not None:
                self._era = self.engine.take(self._num_tokens)
                self._num_asked += 1
        return self.engine is not None

    def send(self, params: DecodeParams | None, sink: ResponseSink) -> Call:
        """The request is on its way to the placed engine. None: decode prefills by itself."""
        assert self.engine is not None
        body = self.request.body.for_decode(params)
        self._call = self.engine.post(self.request.path, self.request.headers, body, sink, fresh=self._fresh)
        return self._call

    def recount(self, num_prompt_tokens: int) -> None:
        """Decode has tokenized the prompt: so many, exactly."""
        num_more = num_prompt_tokens - self._num_prompt_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens += num_more
        if self.engine is not None:
            self.engine.recount(num_more)

    # What the answer says of the engine.

    def began(self) -> None:
        """The client gets the answer's first bytes."""
        if self._suspects is not None:
            self._suspects.accuse()
        if self.engine is not None:
            self.engine.began(self._era)

    def responded(self) -> None:
        """The engine has said what it thinks of the request, be it an error of the client's."""
        if self.engine is not None:
            self.engine.began(self._era)

    def refused(self, status: int) -> None:
        """The engine answered an error that is the client's to see."""
        self.responded()
        if self.engine is not None and status in _UNKNOWN:
            self.engine.weigh_down(self._num_tokens)  # Else it would get nearly all that is asked: it is done at once.

    def succeeded(self) -> None:
        """The answer is whole."""
        if self.engine is not None:
            self.engine.succeeded(self._era)

    def failed(self, blame: Blame) -> None:
        """There is no answer, or not all of it."""
        if self.engine is not None:
            self._suspects = self._suspects or Suspects()
            self._suspects.failed(self.engine, self._era, self._num_tokens, blame)

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
        self._give_back()

    def close(self) -> None:
        """Nothing more comes of this request."""
        self._give_back()
        if self._suspects is not None:
            self._suspects.close(num_asked=self._num_asked)

    def _give_back(self) -> None:
        """The engine aborts the request if it still runs; the engine no longer counts it."""
        if self._call is not None:
            self._call.close()
            self._call = None
        if self.engine is not None:
            self.engine.give_back(self._num_tokens)
            self.engine = None
