"""The engines among which certain requests are placed: all of a pool, or those that serve one model of several.

They are sorted when something changes, never for a request: ``core/engines/placement.py`` sorts, a policy chooses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.placement import (
    Chooser,
    Policy,
    RequestFacts,
    Tally,
    decode_tiers,
    left_of,
    prefill_tiers,
    proven,
    unpaired_tiers,
)
from pdcluster_router.engines.engine import Engine

Tiers: TypeAlias = tuple[list[Engine], ...]
_NO_TIERS: Final[Tiers] = ()


@dataclass(frozen=True, slots=True)
class Heir:
    """The engines for the next step of a request that came before engines began to serve other models."""

    candidates: Candidates
    has_prefill: bool
    """Whether a prefill engine is among them."""


@dataclass(frozen=True, slots=True)
class _Unpaired:
    """The decode engines for requests that need no prefill engine."""

    tiers: Tiers
    choose: Chooser[Engine] | None
    """Chooses among those of the first tier; None: there are no engines."""


class Candidates:
    """Some engines of a roster, which calls ``sort`` when one of them has changed. Event loop only."""

    def __init__(self, policy: Policy, tallies: dict[Role, Tally], now: Callable[[], float]) -> None:
        """``tallies``: where the policy counts its choices. ``now``: monotonic seconds."""
        self.policy = policy
        """Chooses among the engines that may get a request."""
        self.decode_tiers = _NO_TIERS
        self._engines: Sequence[Engine] = ()
        self._unpaired: _Unpaired | None = None
        """None: no request that needs no prefill engine has come since the engines were sorted."""
        self._tallies = tallies
        self._now = now
        self._prefill_tiers: dict[str, Tiers] = {}
        self._choosers: dict[str | None, tuple[list[Engine], Chooser[Engine]]] = {}
        """The chooser of each first tier: prefill's by revision, and decode's under None."""
        self._heir_of: Callable[[str], Heir | None] | None = None

    def sort(self, engines: Sequence[Engine]) -> None:
        """Works out the tiers again. ``engines``: all candidates, as they are now."""
        self._engines, self._unpaired = engines, None
        self.decode_tiers = decode_tiers(engines)
        revisions = {engine.revision for engine in engines}
        self._prefill_tiers = {revision: prefill_tiers(engines, revision) for revision in revisions}
        tiers: list[tuple[str | None, Tiers]] = [(None, self.decode_tiers), *self._prefill_tiers.items()]
        self._choosers = {key: self._chooser(key, found[0]) for key, found in tiers if found}

    def renewed(self, heir_of: Callable[[str], Heir | None]) -> Candidates:
        """The candidates in place of these for requests that come from now on: engines serve other models.

        Requests that wait, or are tried again, still come here. ``heir_of`` says by their model where they are placed.
        """
        new = Candidates(self.policy, self._tallies, self._now)
        new._choosers, self._choosers = self._choosers, {}
        self._heir_of = heir_of
        return new

    def use(self, policy: Policy) -> None:
        """``policy`` chooses from now on. Call ``sort`` next: it makes the policy's choosers."""
        self.policy = policy
        self._choosers = {}

    def place_decode(self, request: RequestFacts, tried: Collection[Engine]) -> Engine | None:
        """As ``Terms.place_decode``."""
        if self._heir_of is not None:
            heir = self._heir_of(request.body.alias_of or request.body.model)
            return heir.candidates.place_decode(request, tried) if heir is not None else None
        if tried or None not in self._choosers:
            return self._choose_other(request, self.decode_tiers, tried)
        return self._choosers[None][1](request, now=self._now(), chance=random.random)

    def place_prefill(self, request: RequestFacts, tried: Sequence[Engine], revision: str) -> Engine | None:
        """As ``Terms.place_prefill``."""
        if self._heir_of is not None:
            heir = self._heir_of(request.body.alias_of or request.body.model)
            return heir.candidates.place_prefill(request, tried, revision) if heir and heir.has_prefill else None
        if tried or revision not in self._choosers:
            return self._choose_other(request, self._prefill_tiers.get(revision, _NO_TIERS), tried)
        return self._choosers[revision][1](request, now=self._now(), chance=random.random)

    def place_unpaired(self, request: RequestFacts, tried: Collection[Engine]) -> Engine | None:
        """As ``place_decode``, for a request that needs no prefill engine."""
        if self._heir_of is not None:
            heir = self._heir_of(request.body.alias_of or request.body.model)
            return heir.candidates.place_unpaired(request, tried) if heir is not None else None
        unpaired = self._sorted_unpaired()
        if tried or unpaired.choose is None:
            return self._choose_other(request, unpaired.tiers, tried)
        return unpaired.choose(request, now=self._now(), chance=random.random)

    def other_decode(self, tried: Collection[Engine]) -> Engine | None:
        """The decode engine with the least to do of the best tier that is left; None: all are ``tried``. For calls
        without KV: where no decode engine has a pair, for any decode engine."""
        now = self._now()
        tiers = self.decode_tiers or self._sorted_unpaired().tiers
        return min(left_of(tiers, tried), key=lambda engine: engine.load.tokens(now=now), default=None)

    def _sorted_unpaired(self) -> _Unpaired:
        if self._unpaired is None:
            tiers = unpaired_tiers(self._engines)
            choose = self.policy(tiers[0], self._tallies[Role.DECODE]) if tiers else None
            self._unpaired = _Unpaired(tiers, choose)
        return self._unpaired

    def _choose_other(self, request: RequestFacts, tiers: Tiers, tried: Collection[Engine]) -> Engine | None:
        engines = proven(left_of(tiers, tried))
        return self.policy(engines)(request, now=self._now(), chance=random.random) if engines else None

    def _chooser(self, key: str | None, engines: list[Engine]) -> tuple[list[Engine], Chooser[Engine]]:
        """The chooser from before if its engines are the same, for its results still hold; else a new one."""
        known = self._choosers.get(key)
        if known and known[0] == engines:
            return known
        return engines, self.policy(engines, self._tallies[Role.DECODE if key is None else Role.PREFILL])
