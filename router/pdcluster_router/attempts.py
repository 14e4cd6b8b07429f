"""The prefill attempts of one request, one after the other: which engine gets the order, and which are not asked again.

Decides nothing about how often: that is ``core/pairing.py``.
"""

from __future__ import annotations

from pdcluster_protocol.ids import Attempt
from pdcluster_protocol.params import Reservation
from pdcluster_router.blame import Suspects
from pdcluster_router.core.breaker import Blame, Era
from pdcluster_router.engine import Engine
from pdcluster_router.prefill import PrefillLeg, PrefillOwner
from pdcluster_router.request import ClientRequest
from pdcluster_router.services import Services


class PrefillAttempts:
    """At most one leg runs at a time. Owned by its exchange; ``abort`` gives the leg back."""

    __slots__ = (
        "_engine",
        "_era",
        "_failed",
        "_leg",
        "_num_asked",
        "_num_tokens",
        "_owner",
        "_services",
        "_suspects",
        "request",
    )

    def __init__(self, services: Services, request: ClientRequest, owner: PrefillOwner) -> None:
        self._services = services
        self.request = request
        self._owner = owner
        self._engine: Engine | None = None
        self._era = Era(0)
        self._num_tokens = 0
        self._failed: list[Engine] = []
        self._num_asked = 0
        self._suspects: Suspects | None = None
        self._leg: PrefillLeg | None = None

    @property
    def engine_name(self) -> str:
        """Who has, or had, the newest attempt; empty before the first."""
        return self._engine.name if self._engine is not None else ""

    def start(self, reservation: Reservation, attempt: Attempt, deadline: float, revision: str) -> bool:
        """The order is on its way; False when no engine is left. ``deadline``: the request's, monotonic seconds.

        ``revision``: decode's. Prefill engines of another one write KV that decode would misread.
        """
        assert self._leg is None, "the attempt before must be aborted first"
        engine = self.request.terms.place_prefill(revision, self._failed)
        if engine is None:
            return False
        self._engine = engine
        params = self._services.prefill_params(reservation, attempt, deadline)
        self._num_tokens = reservation.num_prompt_tokens - reservation.remote_cached_tokens
        self._leg = PrefillLeg(self._owner, engine, self._num_tokens)
        self._era = self._leg.era
        self._num_asked += 1
        self._leg.send(self.request.path, self.request.headers, self.request.body.for_prefill(params))
        return True

    def replied(self) -> None:
        """Prefill says that it has done its part."""
        if self._engine is not None:
            self._engine.began(self._era)

    def succeeded(self) -> None:
        """Decode answers with the KV of the newest attempt: only that proves it."""
        if self._suspects is not None:
            self._suspects.accuse()
        if self._engine is not None:
            self._engine.began(self._era)
            self._engine.succeeded(self._era)

    def failed(self, blame: Blame) -> None:
        """The newest attempt brought no KV; its engine gets no order of this request any more."""
        if self._engine is not None and self._engine not in self._failed:
            self._failed.append(self._engine)
            self._suspects = self._suspects or Suspects()
            self._suspects.failed(self._engine, self._era, self._num_tokens, blame)

    def close(self) -> None:
        """No attempt runs, and none follows."""
        self.abort()
        if self._suspects is not None:
            self._suspects.close(num_asked=self._num_asked)

    def abort(self) -> None:
        """No attempt runs."""
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.close()
