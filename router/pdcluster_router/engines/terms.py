"""Which engines may serve a request, and how often it is tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pdcluster_protocol.metaserver import Action
from pdcluster_router.core.pairing import Retries
from pdcluster_router.engines.engine import Engine


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks of placement."""

    tried: Sequence[Engine] = ()
    """The engines that have failed it."""
    revision: str = ""
    """Of the engine that decodes it: only prefill engines of this revision fit. Empty for decode, which chooses."""


Place: TypeAlias = Callable[[Wish], Engine | None]
"""The engine to ask next; None when no engine is left."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Which engines may serve a request, and how often it is tried. The same for all clients."""

    place_decode: Place
    place_prefill: Place
    retries: Retries
    wants_receipt: bool = False
    """Whether decode shall say how much it was pushed."""

    @property
    def on_prefill_failure(self) -> Action:
        """What decode is told to do when no prefill attempt is left."""
        return Action.RECOMPUTE if self.retries.recomputes else Action.FAIL
