"""The prefill leg of one request: the order goes out, and one word comes back.

Prefill's HTTP answer holds one token that nobody wants; only whether it worked matters, and why not.
"""

from __future__ import annotations

from typing import Final, Protocol

from pdcluster_protocol.params import refusal_in
from pdcluster_router.blame import blame_for
from pdcluster_router.connection import Call, Lost, ResponseHead
from pdcluster_router.core.breaker import Blame
from pdcluster_router.core.rewrite import Parts
from pdcluster_router.core.sse import GAVE_UP, is_given_up
from pdcluster_router.engine import Engine

_MAX_REASON_BYTES: Final = 300
_MAX_REPLY_BYTES: Final = 1 << 20
"""One token and what surrounds it; what goes beyond is not looked into."""


class PrefillOwner(Protocol):
    def prefill_ended(self, failure: str | None, blame: Blame) -> None:
        """Prefill has answered (None), or why it did not. Comes exactly once, unless the leg is closed."""
        ...


class PrefillLeg:
    """One order to one prefill engine. Owned by its exchange; ``close`` gives back the call and the engine."""

    __slots__ = (
        "_body",
        "_call",
        "_engine",
        "_head",
        "_headers",
        "_is_resent",
        "_num_tokens",
        "_owner",
        "_path",
        "_reply",
        "era",
    )

    def __init__(self, owner: PrefillOwner, engine: Engine, num_tokens: int) -> None:
        """``num_tokens``: prompt tokens that this engine will have to compute."""
        self._owner = owner
        self._engine = engine
        self._num_tokens = num_tokens
        self._head: ResponseHead | None = None
        self._reply = b""
        self._is_resent = False
        self._call: Call | None = None
        self.era = engine.take(num_tokens)
        """When it was placed, for the engine's breaker."""

    def send(self, path: bytes, headers: bytes, body: Parts) -> None:
        """The order is on its way."""
        self._path, self._headers, self._body = path, headers, body
        self._call = self._engine.post(path, headers, body, self)

    def close(self) -> None:
        """Prefill aborts the request if it still runs; nothing more is said."""
        if self._call is not None:
            self._call.close()
            self._call = None  # It knows us: nothing that is large stays because of it.
        self._body = (b"", b"")
        self._engine.give_back(self._num_tokens)

    # What the call says (ResponseSink).

    def on_head(self, head: ResponseHead) -> None:
        self._head = head

    def on_body(self, body: bytes) -> None:
        if len(self._reply) <= _MAX_REPLY_BYTES:
            self._reply += body

    def on_end(self) -> None:
        assert self._head is not None
        if self._head.status == 200:
            self._owner.prefill_ended(self._failure_in(self._reply), Blame.PERHAPS)
        else:
            # Not of a 4xx: vLLM's validation errors quote the request, and prompts belong in no log.
            quoted = self._reply[:_MAX_REASON_BYTES] if self._head.status >= 500 else b""
            text = quoted.decode("utf-8", "replace")
            reason = f"{self._engine.name} answered {self._head.status} {text}".rstrip()
            # A 4xx too: decode takes this request, so another prefill engine may.
            self._owner.prefill_ended(reason, Blame.PERHAPS)

    def _failure_in(self, reply: bytes) -> str | None:
        """Why there is no KV although the status says that all is well; None: it is well."""
        if is_given_up(reply):
            return f"{self._engine.name}: {GAVE_UP}"
        refusal = refusal_in(reply)
        return f"{self._engine.name} refused: {refusal}" if refusal else None

    def on_lost(self, lost: Lost) -> None:
        if lost.is_stale and not self._is_resent:
            # The engine closed the idle connection before it could read the order: nothing has begun.
            self._is_resent = True
            self._call = self._engine.post(self._path, self._headers, self._body, self, fresh=True)
        else:
            self._owner.prefill_ended(f"{self._engine.name}: {lost.reason}", blame_for(lost))
