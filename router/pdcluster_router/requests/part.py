"""One part of a client's request: a request of its own to the engines. Its answer goes to the whole, not to a client.

    Exchange, Gate, Relay --HotCycle's calls--> PartCycle --> FanOut

``fan_out.py`` has the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

from pdcluster_router.core.apis.openai_errors import ApiError
from pdcluster_router.core.clients.room import Room
from pdcluster_router.core.engines.listing import Listing
from pdcluster_router.core.engines.placement import RequestFacts
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.roster import Terms
from pdcluster_router.http.cycle import JSON, NO_HEAD, HotCycle


@dataclass(frozen=True, slots=True)
class EngineError:
    """An engine's error answer, ready for the client. ``headers``: whole lines."""

    status: int
    body: bytes
    headers: bytes


PartError: TypeAlias = ApiError | EngineError


class PartOwner(Protocol):
    """The whole that a part belongs to, as the part needs it. ``FanOut`` is the only implementation."""

    def part_begins(self, headers: bytes) -> None:
        """A part's answer begins, with these header lines. The part cannot be tried again."""
        ...

    def part_says(self, part: PartCycle, chunk: bytes) -> None:
        """The next bytes of the part's answer."""
        ...

    def part_ends(self, part: PartCycle) -> None:
        """The part's answer is whole."""
        ...

    def part_fails(self, part: PartCycle, error: PartError) -> None:
        """The part has no answer, or not all of it."""
        ...

    def part_displaces(self) -> None:
        """A part has taken the place of another key's request in the queue."""
        ...

    def part_is_sent(self, part: PartCycle) -> None:
        """The part's body will not be sent again. May be called more than once."""
        ...


class PartCycle(HotCycle):
    """The cycle of a part, which has no client. Event loop only; owned by its whole."""

    __slots__ = ("_whole", "is_withdrawn", "number")

    def __init__(self, whole: PartOwner, number: int, path: bytes, request_id: str, num_body_bytes: int) -> None:
        super().__init__(_NOWHERE, path, NO_HEAD, _is_whole_already, _NO_ROOM)
        self.request_id = request_id.encode("ascii")
        self.num_body_bytes = num_body_bytes
        self.is_withdrawn = False
        self.number = number
        """The number of the part: the ``index`` of its choice."""
        self._whole = whole

    @property
    def is_taken(self) -> bool:
        """Whether an engine has accepted the part: vLLM checks a request before it sends the head of a stream."""
        source = self.source
        return self.has_started or (source is not None and bool(source.stream_lines) and source.may_comment)

    def withdraw(self) -> None:
        """Ends the part, whose whole has ended: gives back all that it holds."""
        self.is_withdrawn = True
        self.gone()

    def displaces(self) -> None:
        self._whole.part_displaces()

    def forget(self) -> None:
        super().forget()
        self._whole.part_is_sent(self)

    def start(self, status: int, headers: bytes, content_length: int | None, first: bytes) -> None:  # noqa: ARG002
        self.has_started = True
        self._whole.part_begins(headers)
        if first:
            self._whole.part_says(self, first)

    def write(self, body: bytes) -> None:
        self._whole.part_says(self, body)

    def end(self) -> None:
        super().end()
        self._whole.part_ends(self)

    def cut(self, last: bytes = b"", error: ApiError | None = None) -> None:  # noqa: ARG002 - the whole has its own
        assert error is not None, "only a relay cuts an answer of a part"
        self._fail(error)

    def refuse(self, status: int, body: bytes, headers: bytes) -> None:
        self._fail(EngineError(status, body, headers))

    def answer_error(self, error: ApiError, headers: bytes = JSON) -> None:  # noqa: ARG002 - the whole writes its own
        self._fail(error)

    def _fail(self, error: PartError) -> None:
        self._finish()
        self._whole.part_fails(self, error)


class OnePrefill:
    """Sends the choices of one prompt to one prefill engine, which computes the prompt once, and has it cached for the
    other choices. A choice that this engine has failed goes elsewhere; an engine that is not well is replaced."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._engine: Engine | None = None
        self._listing: Listing | None = None

    @property
    def terms(self) -> Terms:
        return replace(self._terms, place_prefill=self._place)

    def _place(self, request: RequestFacts, tried: Sequence[Engine], revision: str) -> Engine | None:
        if tried:
            return self._terms.place_prefill(request, tried, revision)
        engine = self._engine
        if engine is None or engine.revision != revision or engine.listing is not self._listing or not engine.is_well:
            self._engine = engine = self._terms.place_prefill(request, tried, revision)
            self._listing = engine.listing if engine is not None else None
        return engine


class _Nowhere:
    """In place of a connection, which a part does not have."""

    is_full: Final = False

    def write(self, data: bytes) -> None:
        """Nothing is written: a part's answer goes to its whole."""

    def answered(self) -> None: ...

    def close(self, *, with_reset: bool = False) -> None: ...


def _is_whole_already(_: HotCycle) -> None:
    """A part has no body to read."""


_NOWHERE: Final = _Nowhere()
_NO_ROOM: Final = Room(0)
