"""The prefill attempts of one request, one after the other: which engine gets the order, and which are not asked again.

Decides nothing about how often: that is ``core/pairing.py``.
"""

from __future__ import annotations

from pdcluster_protocol.ids import Attempt
from pdcluster_protocol.params import Reservation
from pdcluster_router.engine import Engine
from pdcluster_router.prefill import PrefillLeg, PrefillOwner
from pdcluster_router.request import ClientRequest
from pdcluster_router.services import Services


class PrefillAttempts:
    """At most one leg runs at a time. Owned by its exchange; ``abort`` gives the leg back."""

    __slots__ = ("_engine", "_failed", "_leg", "_owner", "_request", "_services")

    def __init__(self, services: Services, request: ClientRequest, owner: PrefillOwner) -> None:
        self._services = services
        self._request = request
        self._owner = owner
        self._engine: Engine | None = None
        self._failed: list[Engine] = []
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
        engine = self._request.terms.place_prefill(revision, self._failed)
        if engine is None:
            return False
        self._engine = engine
        params = self._services.prefill_params(reservation, attempt, deadline)
        self._leg = PrefillLeg(self._owner, engine, reservation.num_prompt_tokens - reservation.remote_cached_tokens)
        self._leg.send(self._request.path, self._request.headers, self._request.body.for_prefill(params))
        return True

    def exclude(self) -> None:
        """The engine of the newest attempt gets no order of this request any more."""
        if self._engine is not None and self._engine not in self._failed:
            self._failed.append(self._engine)

    def abort(self) -> None:
        """No attempt runs."""
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.close()
