"""What a list and a watch of EndpointSlices have said so far, and how long to wait before asking again.

    list --> all slices, at a resource version --watch from there--> ADDED, MODIFIED, DELETED: one slice each
                                                                     BOOKMARK: only a newer version
                                                                     ERROR: over; 410 means that the version is too old

Source of truth: Kubernetes' page "API concepts", "Efficient detection of changes". A failure changes nothing here:
what was known last stays known.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from pdcluster_protocol.errors import ProtocolError, Unavailable
from pdcluster_router.core.endpoint_slices import EndpointSlice, Metadata, Picture, members_of

MIN_DELAY_S: Final = 1.0
MAX_DELAY_S: Final = 30.0


class _List(msgspec.Struct, frozen=True):
    metadata: Metadata
    items: list[EndpointSlice] | None = None


class _Event(msgspec.Struct, frozen=True):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _Bookmark(msgspec.Struct, frozen=True):
    metadata: Metadata


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class SliceCache:
    """All slices of one cluster, as last told. One owner: the discovery's task."""

    def __init__(self) -> None:
        self.resource_version = ""
        """Where a watch goes on; empty before the first list."""
        self._slices: dict[str, EndpointSlice] = {}

    @property
    def picture(self) -> Picture:
        """Costs a look at every endpoint."""
        return members_of(self._slices.values())

    def replace(self, body: bytes) -> None:
        """The answer to a list: all there is.

        Raises:
            ProtocolError: It is no list of EndpointSlices. Nothing has changed.
        """
        try:
            listed = msgspec.json.decode(body, type=_List)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the answer is no list of EndpointSlices: {error}") from error
        self._slices = {one.metadata.name: one for one in listed.items or ()}
        self.resource_version = listed.metadata.resource_version

    def apply(self, line: bytes) -> bool:
        """One event of a watch. Whether a slice has changed.

        Raises:
            Unavailable: The watch is over, as for a version that is too old: list again.
            ProtocolError: It is no event. Nothing has changed.
        """
        try:
            return self._apply(msgspec.json.decode(line, type=_Event))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"this is no event of a watch: {error}") from error

    def _apply(self, event: _Event) -> bool:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            raise Unavailable(f"the watch ended: {status.code} {status.message}")
        if event.type == "BOOKMARK":
            self.resource_version = msgspec.json.decode(event.object, type=_Bookmark).metadata.resource_version
            return False
        one = msgspec.json.decode(event.object, type=EndpointSlice)
        if event.type == "DELETED":
            self._slices.pop(one.metadata.name, None)
        else:
            self._slices[one.metadata.name] = one
        self.resource_version = one.metadata.resource_version
        return True


def delay_s(num_failures: int, chance: float, *, asked_s: float = 0.0) -> float:
    """Seconds to wait after so many failures in a row, at least one: from 1 s, up to 2, 4, 8 ... and at most 30 s.

    ``chance``: in [0, 1), so that the routers of a cluster do not all come back at once. ``asked_s``: what the API
    server itself asked for (Retry-After), heeded up to the same 30 s.
    """
    most = min(MAX_DELAY_S, MIN_DELAY_S * 2.0 ** min(num_failures, 10))
    return min(MAX_DELAY_S, max(asked_s, MIN_DELAY_S + chance * (most - MIN_DELAY_S)))
