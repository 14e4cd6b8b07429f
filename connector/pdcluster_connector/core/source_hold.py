"""The lanes that still read the source blocks of each request, so that no block is overwritten while a lane reads it.

    begin(readers) --released by every reader, and finished by vLLM--> free, named once

vLLM keeps the blocks of a finished request until the request's id is reported as sent. ``take_free`` names the ids to
report. vLLM may overwrite the blocks of these requests at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdcluster_protocol.ids import RequestId

R = TypeVar("R", bound=Hashable)
"""Names one reader: a lane, by the decode rank that it serves."""


@dataclass(slots=True)
class _Hold(Generic[R]):
    readers: set[R]
    is_finished: bool = False


class SourceHolds(Generic[R]):
    """One prefill rank's requests. Not thread-safe: the forward thread owns it."""

    def __init__(self) -> None:
        self._holds: dict[RequestId, _Hold[R]] = {}

    def begin(self, request_id: RequestId, readers: Iterable[R]) -> None:
        """``readers`` may read the request's blocks from now on. Once per request."""
        assert request_id not in self._holds, f"{request_id} is held already"
        self._holds[request_id] = _Hold(set(readers))

    def readers(self, request_id: RequestId) -> frozenset[R]:
        """The readers that have not released the request; empty when it is unknown."""
        hold = self._holds.get(request_id)
        return frozenset(hold.readers) if hold else frozenset()

    def released(self, request_id: RequestId, reader: R) -> None:
        """``reader`` reads the request's blocks no more. Does nothing for an unknown request: it is over already."""
        if hold := self._holds.get(request_id):
            hold.readers.discard(reader)

    def reader_ended(self, reader: R) -> None:
        """``reader`` has ended: it reads no request's blocks any more."""
        for hold in self._holds.values():
            hold.readers.discard(reader)

    def finish(self, request_id: RequestId) -> None:
        """vLLM has ended the request and waits to free its blocks."""
        if hold := self._holds.get(request_id):
            hold.is_finished = True

    def take_free(self) -> set[RequestId]:
        """Finished requests whose blocks have no reader, each named once."""
        free = {request_id for request_id, hold in self._holds.items() if hold.is_finished and not hold.readers}
        for request_id in free:
            del self._holds[request_id]
        return free
