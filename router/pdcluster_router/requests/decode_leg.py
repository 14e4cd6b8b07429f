"""The decode leg of a request: the call to one decode engine, then perhaps to another.

The answer goes to the ``Relay``, unread. ``core/requests/pairing.py`` decides how often something is tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from pdcluster_protocol.params import DecodeParams
from pdcluster_router.core.engines.breaker import FIRST_ERA, Blame
from pdcluster_router.core.engines.uptake import UptakeWatch
from pdcluster_router.engines.engine import Engine
from pdcluster_router.http.connection import Call, ResponseLost, ResponseSink
from pdcluster_router.requests.blame import Suspects
from pdcluster_router.requests.request import ClientRequest

_UNKNOWN: Final = frozenset((401, 403, 404))
"""Statuses of an unknown key or model. Either all engines answer so, or only this one has other options."""
_NOT_FOUND: Final = 404
"""To a pooling request also the status of each engine whose model lacks the path, such as all that serve chats."""

_IS_STUCK: Final = (
    "it takes up no request: for %.0f s it reserved nothing and began no answer, though it answers /health and another "
    "engine works (--idle-timeout is %g s). Look at its log, and restart it if its engine core hangs"
)


@dataclass(frozen=True, slots=True)
class _WithRevisions(Collection[Engine]):
    """Engines, and all others of some revisions: to count those out one by one took seconds in a large pool."""

    engines: tuple[Engine, ...]
    revisions: tuple[str, ...]

    def __contains__(self, engine: object) -> bool:
        return isinstance(engine, Engine) and (engine.revision in self.revisions or engine in self.engines)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self.engines)

    def __len__(self) -> int:
        return 1 + len(self.engines)


class DecodeLeg:
    """The decode leg of a request. Owned by its exchange. ``close`` gives back the call and the engine."""

    __slots__ = (
        "_call",
        "_era",
        "_fresh",
        "_left_revisions",
        "_num_asked",
        "_num_prompt_tokens",
        "_num_tokens",
        "_suspects",
        "_tried",
        "_uptake",
        "engine",
        "request",
    )

    def __init__(self, request: ClientRequest, num_answer_tokens: int) -> None:
        """``num_answer_tokens``: about how many tokens the answer will have."""
        self.engine: Engine | None = None
        self.request = request
        self._num_prompt_tokens = request.body.estimated_prompt_tokens
        self._num_tokens = self._num_prompt_tokens + num_answer_tokens
        self._era = FIRST_ERA
        self._num_asked = 0
        self._suspects: Suspects | None = None
        self._call: Call | None = None
        self._tried: tuple[Engine, ...] = ()  # A tuple costs nothing: as a rule it stays empty.
        self._left_revisions: tuple[str, ...] = ()
        self._fresh = False
        self._uptake: UptakeWatch | None = None

    @property
    def name(self) -> str:
        """The engine that has the request; empty when none does."""
        return self.engine.name if self.engine is not None else ""

    @property
    def revision(self) -> str:
        """The revision of the engine that has the request. Only while one does."""
        assert self.engine is not None
        return self.engine.revision

    def place(self) -> bool:
        """Places the request on an engine that was not tried, if it has none. Returns whether it has one now."""
        if self.engine is None:
            tried = self._excluded() if self._left_revisions else self._tried
            self.engine = self.request.terms.place_decode(self.request, tried)
            if self.engine is not None:
                self._era = self.engine.take(self._num_tokens)
                self._num_asked += 1
        return self.engine is not None

    def _excluded(self) -> Collection[Engine]:
        return _WithRevisions(self._tried, self._left_revisions)

    def send(self, params: DecodeParams | bytes | None, line: bytes, sink: ResponseSink) -> Call:
        """Sends the request to the placed engine, with one more header line. ``params``: None for no transfer."""
        assert self.engine is not None
        body, headers, gateway = self.request.body.for_decode(params), self.request.headers + line, self.request.gateway
        if gateway is None:
            self._call = self.engine.post(self.request.path, headers, body, sink, fresh=self._fresh)
        else:
            self._call = gateway.post(self.engine.url, headers, body, sink)
        return self._call

    def recount(self, num_prompt_tokens: int) -> None:
        """Decode has taken the request up, and has tokenized its prompt: it has exactly ``num_prompt_tokens``."""
        num_more = num_prompt_tokens - self._num_prompt_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens += num_more
        if self.engine is not None:
            self.engine.num_taken_up += 1
            self.engine.recount(num_more)

    # What the answer says of the engine.

    def began(self) -> None:
        """The client gets the answer's first bytes."""
        if self._suspects is not None:
            self._suspects.accuse()
        if self.engine is not None:
            self.engine.num_taken_up += 1
            self.engine.began(self._era)

    def responded(self) -> None:
        """The engine has answered, if only with an error that is the client's fault."""
        if self.engine is not None:
            self.engine.began(self._era)

    def refused(self, status: int) -> None:
        """The engine answered an error that goes to the client."""
        self.responded()
        lacks_path = status == _NOT_FOUND and self.request.api.is_pooling
        if self.engine is not None and status in _UNKNOWN and not lacks_path:
            self.engine.weigh_down(self._num_tokens)  # Else this idle engine would get most requests.

    def succeeded(self) -> None:
        """The answer is whole."""
        if self.engine is not None:
            self.engine.breaker.succeeded(self._era)

    def failed(self, blame: Blame) -> None:
        """There is no answer, or not all of it."""
        if self.engine is not None:
            self._suspects = self._suspects or Suspects()
            self._suspects.failed(self.engine, self._era, self._num_tokens, blame)

    def why_lost(self, quiet_since: float, *, now: float, may_leave: bool) -> str:
        """Why no answer will come; empty: one may come. ``quiet_since``: when the last byte came, monotonic seconds.
        ``may_leave``: decode would have said that it had taken the request up, has not, and another engine may be
        asked. An answer that is not streamed says nothing before it is whole; only a call to the metaserver does."""
        if self.engine is None:
            return ""
        timeouts = self.request.timeouts
        why = self.engine.outage.why_lost(quiet_since, gone_s=timeouts.gone_s, silent_s=timeouts.idle_s)
        return why or (self._why_stuck(self.engine, now) if may_leave else "")

    def _why_stuck(self, engine: Engine, now: float) -> str:
        if self._uptake is None:
            self._uptake = UptakeWatch(engine, now=now)
        tried, limit_s = _WithRevisions((*self._tried, engine), self._left_revisions), self.request.timeouts.idle_s
        stuck_s = self._uptake.stuck_s(
            lambda: self.request.terms.place_decode(self.request, tried), now=now, limit_s=limit_s, most_s=limit_s / 4
        )
        return _IS_STUCK % (stuck_s, limit_s) if stuck_s else ""

    def may_send_again(self, lost: ResponseLost) -> bool:
        """Whether the request surely never reached an engine. If so, ``place`` may be called again."""
        if lost.is_unsent or (lost.is_stale and not self._may_get_work()):
            self.leave()
            return True
        is_first_time = not self._fresh
        self._fresh = True
        return lost.is_stale and is_first_time

    def _may_get_work(self) -> bool:
        """Whether the engine may still take new requests: it may have begun to terminate meanwhile."""
        return self.engine is not None and self.engine.state.was_ready

    def leave(self) -> None:
        """This engine is not asked again for this request; another one may be."""
        if self.engine is not None:
            self._tried += (self.engine,)
        self._fresh = False
        self._uptake = None
        self._give_back()

    def leave_revision(self) -> bool:
        """No engine of this engine's revision is asked again for this request. Returns whether another one is left.

        Only while an engine has the request. That engine keeps it until ``leave``, and is not to blame.
        """
        self._left_revisions += (self.revision,)
        is_left = self.request.terms.place_decode(self.request, self._excluded()) is not None
        self._num_asked -= is_left
        return is_left

    def spare(self) -> None:
        """The engine aborts the request, which failed through no fault of the engine. The engine may be asked again."""
        self._num_asked -= 1
        self._uptake = None
        self._give_back()

    def close(self) -> None:
        """The request is over: gives back the call and the engine."""
        self._give_back()
        if self._suspects is not None:
            self._suspects.close(num_asked=self._num_asked)

    def _give_back(self) -> None:
        """Has the engine abort the request if it still runs, and takes the request off the engine's load."""
        if self._call is not None:
            if not self._call.is_closed:  # As a rule it has ended.
                self._call.close()
            self._call = None
        if self.engine is not None:
            self.engine.give_back(self._num_tokens)
            self.engine = None
