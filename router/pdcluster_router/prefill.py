"""The prefill leg of one request: the order goes out, and one word comes back.

Prefill's HTTP answer holds one token that nobody wants; only whether it worked matters, and why not.
"""

from __future__ import annotations

from typing import Final, Protocol

from pdcluster_protocol.params import refusal_in
from pdcluster_router.connection import Call, Lost, ResponseHead
from pdcluster_router.engine import Engine

_MAX_REASON_BYTES: Final = 300
_MAX_REPLY_BYTES: Final = 1 << 20
"""One token and what surrounds it; what goes beyond is not looked into."""


class PrefillOwner(Protocol):
    def prefill_ended(self, failure: str | None) -> None:
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
        engine.take(num_tokens)

    def send(self, path: bytes, headers: bytes, body: bytes) -> None:
        """The order is on its way."""
        self._path, self._headers, self._body = path, headers, body
        self._call = self._engine.post(path, headers, body, self)

    def close(self) -> None:
        """Prefill aborts the request if it still runs; nothing more is said."""
        if self._call is not None:
            self._call.close()
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
            refusal = refusal_in(self._reply)
            self._owner.prefill_ended(f"{self._engine.name} refused: {refusal}" if refusal else None)
        else:
            # Not of a 4xx: vLLM's validation errors quote the request, and prompts belong in no log.
            quoted = self._reply[:_MAX_REASON_BYTES] if self._head.status >= 500 else b""
            text = quoted.decode("utf-8", "replace")
            self._owner.prefill_ended(f"{self._engine.name} answered {self._head.status} {text}".rstrip())

    def on_lost(self, lost: Lost) -> None:
        if lost.is_stale and not self._is_resent:
            # The engine closed the idle connection before it could read the order: nothing has begun.
            self._is_resent = True
            self._call = self._engine.post(self._path, self._headers, self._body, self, fresh=True)
        else:
            self._owner.prefill_ended(f"{self._engine.name}: {lost.reason}")
