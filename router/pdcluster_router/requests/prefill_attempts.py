"""The prefill leg of a request: which engine gets it, whether it worked, and why not.

    PrefillAttempts  one call to a prefill engine after the other
    PrefillLeg       one of these calls

``core/requests/pairing.py`` decides how often something is tried.
"""

from __future__ import annotations

from asyncio import TimerHandle
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from pdcluster_protocol.ids import Attempt
from pdcluster_protocol.prefill_answer import NOTHING_SAID, PrefillAnswer, prefill_answer_in
from pdcluster_router.core.apis.client_apis import ClientApi
from pdcluster_router.core.apis.rewrite import Bytes, Parts
from pdcluster_router.core.engines.breaker import FIRST_ERA, Blame
from pdcluster_router.core.requests.dialect import Posted
from pdcluster_router.core.requests.pairing import Timeouts
from pdcluster_router.core.telemetry.histogram import COARSE
from pdcluster_router.engines.engine import Engine
from pdcluster_router.http.connection import Call, ResponseHead, ResponseLost
from pdcluster_router.requests.blame import Suspects, blame_for
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.services import Services

PrefillEnd: TypeAlias = Callable[[str | None, Blame, PrefillAnswer], None]
"""Called once, unless the leg is closed: why prefill failed (None: it did not), whose fault that is, its words."""
_NOTHING: Final = (b"", b"")
_STALE_S: Final = 1.0
"""Within this time the router learns that an engine had closed the idle connection before a call reached it."""
_MAX_REASON_BYTES: Final = 300
_MAX_REPLY_BYTES: Final = 1 << 20
"""One token and what surrounds it, of an API whose answers do not repeat the request. The rest of a longer reply is
dropped."""


class PrefillAttempts:
    """The prefill attempts of a request, one leg at a time. Owned by its exchange; ``abort`` gives the leg back."""

    __slots__ = (
        "_engine",
        "_era",
        "_failed",
        "_leg",
        "_num_asked",
        "_num_tokens",
        "_on_end",
        "_services",
        "_suspects",
        "request",
    )

    def __init__(self, services: Services, request: ClientRequest, on_end: PrefillEnd) -> None:
        self._services = services
        self.request = request
        self._on_end = on_end
        self._engine: Engine | None = None
        self._era = FIRST_ERA
        self._num_tokens = 0
        self._failed: tuple[Engine, ...] = ()
        self._num_asked = 0
        self._suspects: Suspects | None = None
        self._leg: PrefillLeg | None = None

    @property
    def engine_name(self) -> str:
        """The engine that has, or had, the newest attempt; empty before the first."""
        return self._engine.name if self._engine is not None else ""

    def start(self, reservation: Posted, attempt: Attempt, deadline: float, revision: str) -> bool:
        """Sends the call. Returns False if no engine is left. ``deadline``: the transfer's, monotonic seconds.
        ``revision``: decode's. Prefill engines of another revision write KV that decode would misread.
        """
        assert self._leg is None, "the attempt before must be aborted first"
        engine = self.request.terms.place_prefill(self.request, self._failed, revision)
        if engine is None:
            return False
        self._engine = engine
        params = self._services.prefill_params(reservation, attempt, deadline)
        self._num_tokens = reservation.num_prompt_tokens - reservation.remote_cached_tokens
        self._leg = PrefillLeg(self._on_end, engine, self._num_tokens, self.request.api)
        self._era = self._leg.era
        self._num_asked += 1
        trace_line = b"" if self.request.trace is None else self.request.trace.next_line()
        headers = self.request.headers + trace_line + self._services.dialect.transfer_line(reservation.transfer_id)
        self._leg.send(self.request.path, headers, self.request.body.for_prefill(params))
        return True

    def has_another(self, revision: str) -> bool:
        """Whether there is an engine for the next attempt."""
        return self.request.terms.place_prefill(self.request, self._failed, revision) is not None

    def replied(self, seconds: float) -> None:
        """The prefill engine has answered without an error, so long after its call."""
        if self._engine is not None:
            self._engine.began(self._era)
            answered = self._engine.answered  # ``Histogram.add``, without a call.
            answered.counts[bisect_left(COARSE, seconds)] += 1
            answered.total += seconds

    def succeeded(self) -> None:
        """Decode answers with the KV of the newest attempt: only that proves that the attempt succeeded."""
        if self._suspects is not None:
            self._suspects.accuse()
        if self._engine is not None:
            self._engine.began(self._era)
            self._engine.breaker.succeeded(self._era)

    def failed(self, blame: Blame) -> None:
        """The newest attempt brought no KV; its engine gets no further attempt of this request."""
        if self._engine is not None and self._engine not in self._failed:
            self._failed += (self._engine,)
            self._suspects = self._suspects or Suspects()
            self._suspects.failed(self._engine, self._era, self._num_tokens, blame)

    def look(self) -> None:
        """Fails the running attempt if its engine is gone."""
        if self._leg is not None:
            self._leg.look(self.request.timeouts)

    def close(self) -> None:
        """No attempt runs, and none follows."""
        if self._leg is not None:
            self.abort()
        if self._suspects is not None:
            self._suspects.close(num_asked=self._num_asked)

    def abort(self) -> None:
        """Ends the attempt that runs. If the dialect says so, its call goes on for a while."""
        leg, self._leg = self._leg, None
        if leg is not None:
            goes_on = self._services.dialect.prefill_goes_on
            leg.leave(self._services, self.request.timeouts.prefill_s if goes_on else 0.0)


class PrefillLeg:
    """One call to one prefill engine. Owned by ``PrefillAttempts``; ``close`` gives back the call and the engine."""

    __slots__ = (
        "_began_at",
        "_body",
        "_call",
        "_engine",
        "_head",
        "_headers",
        "_is_over",
        "_is_resent",
        "_max_echo_bytes",
        "_max_reply_bytes",
        "_num_tokens",
        "_on_end",
        "_path",
        "_problem_in",
        "_reply",
        "_timer",
        "era",
    )

    def __init__(self, on_end: PrefillEnd, engine: Engine, num_tokens: int, api: ClientApi) -> None:
        """``num_tokens``: prompt tokens that this engine will have to compute. ``api``: the client's."""
        self._problem_in = api.prefill_problem
        self._on_end = on_end
        self._engine = engine
        self._num_tokens = num_tokens
        self._head: ResponseHead | None = None
        self._reply: Bytes = b""
        self._max_echo_bytes = api.max_echo_bytes
        self._max_reply_bytes = _MAX_REPLY_BYTES
        self._is_resent = False
        self._is_over = False
        self._timer: TimerHandle | None = None
        self._call: Call | None = None
        self.era = engine.take(num_tokens)
        """The era of the engine's breaker in which the call was placed."""
        self._began_at = engine.load.placed_at

    def send(self, path: bytes, headers: bytes, body: Parts) -> None:
        """Sends the call."""
        self._path, self._headers, self._body = path, headers, body
        self._max_reply_bytes = _MAX_REPLY_BYTES + self._max_echo_bytes(len(body[0]))
        self._post()

    def look(self, timeouts: Timeouts) -> None:
        """Counts the call as lost if its engine is gone."""
        outage = self._engine.outage
        if why := outage.why_lost(self._began_at, gone_s=timeouts.gone_s, silent_s=timeouts.idle_s):
            self.on_lost(ResponseLost(why))

    def leave(self, services: Services, goes_on_s: float) -> None:
        """Calls the owner no more. Prefill goes on with the request for ``goes_on_s`` at most; 0: it aborts it."""
        if self._is_over or not goes_on_s:
            self.close()
        else:
            self._on_end = self._end_alone
            self._timer = services.call_later(_STALE_S, partial(self._go_on_alone, services, goes_on_s))

    def _go_on_alone(self, services: Services, seconds: float) -> None:
        """The call has reached the engine. Its body counts in no client's room any more, and is not kept."""
        self._body, self._headers, self._is_resent = _NOTHING, b"", True
        self._timer = services.call_later(seconds, self.close)

    def close(self) -> None:
        """Has prefill abort the request if it still runs. Calls the owner no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None  # It refers to us.
        if self._call is not None:
            self._call.close()
            self._call = None  # It refers to us, and would keep large things alive.
        self._on_end = _end_unheard
        self._body = _NOTHING
        self._engine.give_back(self._num_tokens)

    def _end_alone(self, *_: object) -> None:
        """A call that went on after ``leave`` has ended: there is nothing to retry."""
        self.close()

    # What the call says (ResponseSink).

    def on_head(self, head: ResponseHead) -> None:
        self._head = head

    def on_body(self, body: bytes) -> None:
        if not self._reply:
            self._reply = body
        elif len(self._reply) <= self._max_reply_bytes:
            if not isinstance(self._reply, bytearray):
                self._reply = bytearray(self._reply)
            self._reply += body

    def on_end(self) -> None:
        assert self._head is not None
        self._is_over = True
        if self._head.status == 200:
            said = prefill_answer_in(self._reply)
            self._on_end(self._failure_in(self._reply, said), Blame.PERHAPS, said)
        else:
            # A 4xx is not quoted: vLLM's validation errors quote the request, and prompts belong in no log.
            quoted = self._reply[:_MAX_REASON_BYTES] if self._head.status >= 500 else b""
            text = quoted.decode("utf-8", "replace")
            reason = f"{self._engine.name} answered {self._head.status} {text}".rstrip()
            # Another engine may succeed, after a 4xx too: decode accepts this request.
            self._on_end(reason, Blame.PERHAPS, NOTHING_SAID)

    def _failure_in(self, reply: Bytes, said: PrefillAnswer) -> str | None:
        """Why there is no KV although the status is 200; None: all is well."""
        if why := self._problem_in(reply):
            return f"{self._engine.name}: {why}"
        return f"{self._engine.name} refused: {said.pdcluster_reason}" if said.pdcluster_reason else None

    def on_lost(self, lost: ResponseLost) -> None:
        if lost.is_stale and not self._is_resent:
            # The engine closed the idle connection before it could read the call: nothing has begun.
            self._is_resent = True
            self._post()
        else:
            self._is_over = True
            self._on_end(f"{self._engine.name}: {lost.reason}", blame_for(lost), NOTHING_SAID)

    def _post(self) -> None:
        """Sends the call; the second time on a new connection."""
        self._reply = b""
        self._call = self._engine.post(self._path, self._headers, self._body, self, fresh=self._is_resent)


def _end_unheard(*_: object) -> None:
    """The leg's owner has closed it: there is nothing to report."""
