"""One client request, parsed: what every later step is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from pdcluster_protocol.labels import Role
from pdcluster_protocol.metaserver import Action
from pdcluster_router.core.pairing import Retries, Timeouts
from pdcluster_router.core.rewrite import ClientBody
from pdcluster_router.engine import Engine

PlaceDecode: TypeAlias = Callable[[Sequence[Engine]], Engine | None]
"""The engine to ask next, given those that were tried; None when nobody is left."""
PlacePrefill: TypeAlias = Callable[[str, Sequence[Engine]], Engine | None]
"""Likewise, among the engines of a revision."""

LARGE_BODY_BYTES: Final = 4 << 10
"""A body from here on is forgotten as soon as nobody is to be sent it any more. That takes 1 us; its scan took 5."""


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


class ClientRequest(msgspec.Struct, frozen=True):
    """What the client wants. ``headers``: whole lines that go to both engines."""

    path: bytes
    headers: bytes
    request_id: str
    body: ClientBody
    timeouts: Timeouts
    terms: Terms
    has_transfer: bool
    """Whether a prefill engine shall do the prompt; False: decode does it by itself."""
    client: str
    """Name of the API key that it showed; empty where none is asked for."""
    received_at: float
    """Monotonic seconds. The request's times count from here, also while it waits to enter."""

    @property
    def prefill_role(self) -> Role:
        """Of the engines whose work the prompt is."""
        return Role.PREFILL if self.has_transfer else Role.DECODE

    @property
    def deadline(self) -> float:
        """Until when it must have gone to decode, monotonic seconds."""
        return self.received_at + self.timeouts.enter_s

    def without_body(self) -> ClientRequest:
        """The same, once nobody is to be sent it any more."""
        return msgspec.structs.replace(self, headers=b"", body=self.body.forgotten())
