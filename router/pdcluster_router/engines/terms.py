"""Which engines may serve a request, and how often it is tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pdcluster_protocol.metaserver import Action
from pdcluster_router.core.pairing import Retries
from pdcluster_router.engines.engine import Engine

PlaceDecode: TypeAlias = Callable[[Sequence[Engine]], Engine | None]
"""The engine to ask next, given those that were tried; None when no engine is left."""
PlacePrefill: TypeAlias = Callable[[str, Sequence[Engine]], Engine | None]
"""Likewise, among the engines of a revision."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Which engines may serve a request, and how often it is tried. The same for all clients."""

    place_decode: PlaceDecode
    place_prefill: PlacePrefill
    retries: Retries
    wants_receipt: bool = False
    """Whether decode shall say how much it was pushed."""

    @property
    def on_prefill_failure(self) -> Action:
        """What decode is told to do when no prefill attempt is left."""
        return Action.RECOMPUTE if self.retries.recomputes else Action.FAIL
