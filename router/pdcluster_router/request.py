"""One client request, parsed: what every later step is given."""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster_router.core.pairing import Timeouts
from pdcluster_router.core.rewrite import ClientBody


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What the client wants. ``headers``: whole lines that go to both engines."""

    path: bytes
    headers: bytes
    request_id: str
    body: ClientBody
    timeouts: Timeouts
    has_transfer: bool
    """Whether a prefill engine shall do the prompt; False: decode does it by itself."""
    received_at: float
    """Monotonic seconds. The request's one deadline counts from here, also while it waits to enter."""

    @property
    def deadline(self) -> float:
        """Monotonic seconds."""
        return self.received_at + self.timeouts.request_s
