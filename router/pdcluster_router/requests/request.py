"""One client request, parsed: what every later step is given."""

from __future__ import annotations

from typing import Final

import msgspec

from pdcluster_protocol.labels import Role
from pdcluster_router.core.pairing import Timeouts
from pdcluster_router.core.rewrite import ClientBody
from pdcluster_router.engines.terms import Terms

LARGE_BODY_BYTES: Final = 4 << 10
"""A body from here on is forgotten as soon as no engine is to be sent it any more. That takes 1 us; its scan took 5."""


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
        """When the request must have gone to decode at the latest, monotonic seconds."""
        return self.received_at + self.timeouts.enter_s

    def without_body(self) -> ClientRequest:
        """The same, once no engine is to be sent it any more."""
        return msgspec.structs.replace(self, headers=b"", body=self.body.forgotten())
