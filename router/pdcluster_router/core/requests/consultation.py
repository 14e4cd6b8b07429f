"""A gateway asks the picker about one request: who may say what, and when. Envoy's external processing.

    gateway  --head, body-->  READING --whole--> DECIDING --deliver--> DELIVERED --answer's head--> HELD
    (Envoy)                     |                   |                      |                         |   begin_answer
                                | pass_by           | refuse               | refuse                  v
                                v                   v                      v       end, cut       FLOWING
                             PASSING              OVER <----------------------------------------------+

Decides which replies the gateway gets, in the order that its protocol wants them. Knows no engine, no body's meaning
and no protobuf: ``front/picker/wire.py`` translates. Modes of a body differ in what the gateway has to be told:

    DUPLEX            it sends pieces and forgets them: all that goes on comes from here, in pieces of any size
    all other ones    each message gets one reply; a BUFFERED body is one message, whose reply may replace it

An error may be said at any time and ends all: before the answer's head it is the answer, after it the client is cut
off.

Source of truth: Envoy 1.40 ``api/envoy/service/ext_proc/v3/external_processor.proto`` and, for modes,
``api/envoy/extensions/filters/http/ext_proc/v3/processing_mode.proto``. That errors may come unasked is measured:
``docs/decisions/0050-endpoint-picker.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Final, TypeAlias

from pdcluster_protocol.errors import ProtocolError
from pdcluster_router.core.apis.request_head import Headers
from pdcluster_router.core.requests.gateway_headers import NO_CHANGES, HeaderChanges

PIECE_BYTES: Final = 62_000
"""The most bytes in one reply: as Gateway API Inference Extension ``pkg/common/envoy/chunking.go`` has it, for Envoy
advises 64 KiB at most."""


class BodyMode(IntEnum):
    """How a gateway sends a body. The numbers are Envoy's ``BodySendMode``."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    PARTIAL = 3
    DUPLEX = 4


class GatewaySide(Enum):
    REQUEST = auto()
    ANSWER = auto()


@dataclass(frozen=True, slots=True)
class BodyModes:
    """The gateway's modes for both bodies. The default is what the Gateway API Inference Extension asks of gateways."""

    request: BodyMode = BodyMode.DUPLEX
    answer: BodyMode = BodyMode.DUPLEX


# What the gateway says.


@dataclass(frozen=True, slots=True)
class GatewayHead:
    """A head. ``is_last``: no body follows. ``endpoints``: those that may be picked; None: any. ``modes``: in the first
    message of a stream; None: the gateway names none."""

    side: GatewaySide
    headers: Headers
    is_last: bool
    endpoints: frozenset[str] | None = None
    modes: BodyModes | None = None


@dataclass(frozen=True, slots=True)
class GatewayBody:
    """A piece of a body, which may be empty. ``is_last``: no further piece and no trailers follow."""

    side: GatewaySide
    body: bytes
    is_last: bool


@dataclass(frozen=True, slots=True)
class GatewayTrailers:
    side: GatewaySide


GatewayMessage: TypeAlias = GatewayHead | GatewayBody | GatewayTrailers


# What it is told.


@dataclass(frozen=True, slots=True)
class HeadReply:
    """The head goes on, changed. ``endpoint``: the engine's host and port; empty: this reply picks none."""

    side: GatewaySide
    changes: HeaderChanges = NO_CHANGES
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class BodyReply:
    """This piece goes on. ``body``: None: as it came. ``is_piece``: the mode is DUPLEX, and ``is_last`` counts."""

    side: GatewaySide
    body: bytes | memoryview | None
    is_last: bool = False
    is_piece: bool = True
    changes: HeaderChanges = NO_CHANGES
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class TrailersReply:
    side: GatewaySide


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The client gets this answer; if the answer has begun, it is cut off. The gateway says and hears nothing more."""

    status: int
    headers: Headers
    body: bytes


GatewayReply: TypeAlias = HeadReply | BodyReply | TrailersReply | ErrorReply
Replies: TypeAlias = tuple[GatewayReply, ...]


class Heard(Enum):
    """The meaning of a message for the request. A message may have several, in this order."""

    HEAD = auto()
    """Its head is here: ``pass_by``, ``ask_for_body`` or ``refuse`` comes next."""
    PART = auto()
    """A piece of its body, not empty."""
    WHOLE = auto()
    """All of it is here: ``deliver`` or ``refuse`` comes next, however late."""
    WITHDRAWN = auto()
    """The gateway answers its client itself."""
    ANSWER_HEAD = auto()
    ANSWER_PART = auto()
    """A piece of the answer, not empty, which reaches the client only by ``write``."""
    ANSWER_END = auto()


class _ConsultationStep(Enum):
    BEFORE = auto()
    READING = auto()
    DECIDING = auto()
    PASSING = auto()
    DELIVERED = auto()
    HELD = auto()
    FLOWING = auto()
    OVER = auto()


_S, _REQUEST, _ANSWER = _ConsultationStep, GatewaySide.REQUEST, GatewaySide.ANSWER


class Consultation:
    """One request of a gateway. Not thread-safe: one owner, the picker's stream.

    ``hear`` returns what a message means, and the replies that are due at once. All other methods return replies.
    """

    __slots__ = ("_has_answer_body", "_has_trailers", "_step", "modes")

    def __init__(self) -> None:
        self.modes = BodyModes()
        self._step = _S.BEFORE
        self._has_trailers = {_REQUEST: False, _ANSWER: False}
        self._has_answer_body = False

    @property
    def is_over(self) -> bool:
        """Nothing more is said, and nothing that comes counts."""
        return self._step is _S.OVER

    @property
    def is_passing(self) -> bool:
        """The answer goes to the client whatever is said here, except that an error cuts it off."""
        return self._step is _S.PASSING or (self._step is _S.FLOWING and not self.carries_answer)

    @property
    def carries_answer(self) -> bool:
        """Whether the answer's bytes come here, and go on from here."""
        return self.modes.answer is BodyMode.DUPLEX

    @property
    def is_held(self) -> bool:
        """The gateway waits with the answer's head: ``begin_answer`` or ``refuse`` comes next."""
        return self._step is _S.HELD

    @property
    def may_add(self) -> bool:
        """Whether bytes may go to the client that are not the engine's. Before the first piece of an answer Envoy takes
        them for a mistake, and ends the stream (measured)."""
        return self.carries_answer and self._has_answer_body and self._step in (_S.HELD, _S.FLOWING)

    @property
    def problem(self) -> str:
        """Why a request's body cannot be changed in this mode; empty: it can."""
        if self.modes.request in (BodyMode.DUPLEX, BodyMode.BUFFERED):
            return ""
        name = self.modes.request.name.replace("PARTIAL", "BUFFERED_PARTIAL")
        return f"the gateway's request_body_mode is {name}: set FULL_DUPLEX_STREAMED, or BUFFERED"

    # What the gateway says.

    def hear(self, message: GatewayMessage) -> tuple[tuple[Heard, ...], Replies]:
        """Raises: ProtocolError: No gateway says this now."""
        if self._step is _S.OVER:
            return (), ()
        if message.side is _ANSWER:
            return self._hear_answer(message)
        if isinstance(message, GatewayHead):
            return self._hear_head(message), ()
        if self._step is _S.PASSING:
            return (), self._passed(message)
        if self._step is not _S.READING:
            if isinstance(message, GatewayTrailers) and self.modes.request is not BodyMode.DUPLEX:
                return (), (TrailersReply(_REQUEST),)
            raise ProtocolError(f"the gateway sends more of a request that is {self._step.name}")
        return self._hear_body(message), ()

    def _hear_head(self, head: GatewayHead) -> tuple[Heard, ...]:
        if self._step is not _S.BEFORE:
            raise ProtocolError("the gateway sends a second head of one request")
        self.modes = head.modes or BodyModes()
        self._step = _S.DECIDING if head.is_last else _S.READING
        return (Heard.HEAD, Heard.WHOLE) if head.is_last else (Heard.HEAD,)

    def _hear_body(self, message: GatewayBody | GatewayTrailers) -> tuple[Heard, ...]:
        if isinstance(message, GatewayTrailers):
            self._has_trailers[_REQUEST] = True
            self._step = _S.DECIDING
            return (Heard.WHOLE,)
        part = (Heard.PART,) if message.body else ()
        if not message.is_last and self.modes.request is not BodyMode.BUFFERED:
            return part
        self._step = _S.DECIDING
        return (*part, Heard.WHOLE)

    def _hear_answer(self, message: GatewayMessage) -> tuple[tuple[Heard, ...], Replies]:
        if self._step in (_S.BEFORE, _S.READING, _S.DECIDING):  # The gateway itself refuses the request.
            self._step = _S.PASSING
            return (Heard.WITHDRAWN,), self._passed(message)
        if self.is_passing:
            return (), self._passed(message)
        if isinstance(message, GatewayHead):
            if self._step is not _S.DELIVERED:
                raise ProtocolError("the gateway sends a second head of one answer")
            self._step = _S.HELD
            return (Heard.ANSWER_HEAD, Heard.ANSWER_END) if message.is_last else (Heard.ANSWER_HEAD,), ()
        if self._step is _S.DELIVERED:
            raise ProtocolError("the gateway sends no head of an answer: set response_header_mode to SEND")
        if isinstance(message, GatewayTrailers):
            self._has_trailers[_ANSWER] = True
            return (Heard.ANSWER_END,), ()
        self._has_answer_body = True
        part = (Heard.ANSWER_PART,) if message.body else ()
        return (*part, Heard.ANSWER_END) if message.is_last else part, ()

    def _passed(self, message: GatewayMessage) -> Replies:
        """The reply that lets a message go on as it is."""
        if isinstance(message, GatewayHead):
            return (HeadReply(message.side),)
        if isinstance(message, GatewayTrailers):
            return (TrailersReply(message.side),)
        mode = self.modes.request if message.side is _REQUEST else self.modes.answer
        if mode is not BodyMode.DUPLEX:
            return (BodyReply(message.side, None, is_piece=False),)
        return tuple(_pieces(message.side, (message.body,), is_last=message.is_last))

    # What is decided of the request.

    def ask_for_body(self) -> Replies:
        """The head waits for its body, which the gateway may only send after a reply."""
        is_due = self._step is _S.READING and self.modes.request is BodyMode.BUFFERED
        return (HeadReply(_REQUEST),) if is_due else ()

    def pass_by(self, endpoint: str, changes: HeaderChanges) -> Replies:
        """Request and answer go by as they are, to and from this engine. Right after the head."""
        assert self._step in (_S.READING, _S.DECIDING)
        self._step = _S.PASSING
        return (HeadReply(_REQUEST, changes, endpoint),)

    def deliver(self, endpoint: str, changes: HeaderChanges, body: Iterable[bytes | memoryview]) -> Replies:
        """This engine gets the request with ``body``, joined. Only for a whole request with a body."""
        assert self._step is _S.DECIDING
        self._step = _S.DELIVERED
        if self.modes.request is BodyMode.BUFFERED:
            whole = b"".join(body)
            sized = changes.with_length(len(whole))
            return (BodyReply(_REQUEST, whole, is_piece=False, changes=sized, endpoint=endpoint),)
        pieces = tuple(_pieces(_REQUEST, body, is_last=not self._has_trailers[_REQUEST]))
        trailers = (TrailersReply(_REQUEST),) if self._has_trailers[_REQUEST] else ()
        return (HeadReply(_REQUEST, changes, endpoint), *pieces, *trailers)

    def refuse(self, error: ErrorReply) -> Replies:
        """The client gets ``error``; if its answer has begun, it is cut off."""
        if self._step is _S.OVER:
            return ()
        self._step = _S.OVER
        return (error,)

    # What is decided of the answer.

    def begin_answer(self, changes: HeaderChanges) -> Replies:
        """The client gets the answer's head. Only while ``is_held``."""
        assert self._step is _S.HELD
        self._step = _S.FLOWING
        return (HeadReply(_ANSWER, changes),)

    def write(self, body: bytes) -> Replies:
        """The client gets these bytes next, if the answer is carried here. Only once it has begun."""
        assert self._step is _S.FLOWING
        return tuple(_pieces(_ANSWER, (body,), is_last=False)) if self.carries_answer and body else ()

    def end(self) -> Replies:
        """The client has the whole answer. Only once it has begun."""
        assert self._step is _S.FLOWING
        if not self.carries_answer:
            return ()
        self._step = _S.OVER
        is_trailers = self._has_trailers[_ANSWER]
        return (TrailersReply(_ANSWER),) if is_trailers else (BodyReply(_ANSWER, b"", is_last=True),)

    def close(self) -> None:
        """The gateway has ended the stream."""
        self._step = _S.OVER


def _pieces(side: GatewaySide, body: Iterable[bytes | memoryview], *, is_last: bool) -> Iterator[BodyReply]:
    """``body`` in pieces of ``PIECE_BYTES`` at most; one of them, perhaps an empty one, is the last if ``is_last``.

    A small body is joined to one piece: each costs a message. And a gateway whose picker dies between two of them may
    give an engine the first.
    """
    views = [memoryview(part) for part in body if len(part)]
    if len(views) > 1 and sum(map(len, views)) <= PIECE_BYTES:
        views = [memoryview(b"".join(views))]
    cuts = [view[at : at + PIECE_BYTES] for view in views for at in range(0, len(view), PIECE_BYTES)]
    for piece in cuts[:-1]:
        yield BodyReply(side, piece)
    if cuts or is_last:
        yield BodyReply(side, cuts[-1] if cuts else b"", is_last=is_last)
