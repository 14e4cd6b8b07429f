"""The last requests of this router, kept in memory for ``pdcluster why``: docs/decisions/0030-why.md.

    exchange, queue, refusals --KeptRow--> keep() --> a ring each for what was served, what was refused, what failed
    GET /pdcluster/requests?id=ID --> find() --> KeptRequest

Each fate has a ring of its own, so that neither good requests nor clients' mistakes push out failed ones. Rings are
bounded in bytes. A request pays for one row of plain values, 4 us in all. The rest of the work is done when a user
asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Final, TypeAlias

import msgspec

from pdcluster_protocol.kept import MAX_FOUND, KeptRequest, Moment, QueueAhead
from pdcluster_protocol.labels import Role
from pdcluster_router.core.telemetry.ring import Ring
from pdcluster_router.core.telemetry.scrub import scrub
from pdcluster_router.core.telemetry.why import OK
from pdcluster_router.telemetry.access_log import word_of
from pdcluster_router.telemetry.metrics import Outcome

MAX_MOMENTS: Final = 64
"""The most moments of one request: the first and the last ones. Three prefill and two decode attempts make up to 26."""
MAX_PARTS: Final = MAX_MOMENTS * len(Moment.__struct_fields__)
"""The most fields of a request's moments."""
MAX_REASON_CHARS: Final = 400
"""The most characters of a failure's reason."""
MAX_MODEL_BYTES: Final = 1024
"""The most bytes of a model's name as the client wrote it; a longer name is told as ``?``."""

MomentPart: TypeAlias = float | int | str


class KeptRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request as it is kept: the fields of ``KeptRequest``, as cheap to make as can be."""

    request_id: str
    transfer_id: str = ""
    trace_id: str = ""
    client: str = ""
    client_address: str = ""
    model_text: bytes = b""
    """JSON, as the client wrote it."""
    path: bytes = b""
    is_stream: bool | None = None
    ended_at_unix_s: float | None = None
    total_s: float | None = None
    read_s: float | None = None
    turn_s: float | None = None
    queue_s: float | None = None
    status: int | None = None
    outcome: str = ""
    error: str = ""
    revision: str = ""
    is_local_prefill: bool | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    moments: Sequence[MomentPart] = ()
    """The fields of each ``Moment``, one after the other."""
    ahead: tuple[Role, int, int, str] | None = None
    """The role of the queue, its first turn while the request waited, and the turn after the last: as in
    ``ClientRequest``."""


class Fate(Enum):
    """The ring that remembers a request."""

    __hash__ = object.__hash__

    SERVED = "served"
    """Whole, and nothing failed on the way."""
    REFUSED = "refused"
    """Its client made a mistake, or asked for too much at a time, or left."""
    FAILED = "failed"
    """All others, also those that were served after a failure."""


_SERVED: Final = Fate.SERVED
"""A name of its own: nearly each request reads it."""
_REFUSED: Final = frozenset(
    one.value for one in (Outcome.REJECTED, Outcome.LIMITED, Outcome.OVERLOADED, Outcome.CLIENT_GONE)
)
_EIGHTHS: Final = {Fate.SERVED: 3, Fate.REFUSED: 1, Fate.FAILED: 4}
"""Eighths of the bytes. REFUSED has one, for any client can cause masses of such requests."""


class Kept:
    """Owned by ``Services``. Event loop only."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: of all rings together; 0: nothing is remembered."""
        self.is_on = max_bytes > 0
        self._rings = {fate: Ring(max_bytes * eighths // 8) for fate, eighths in _EIGHTHS.items()}

    @property
    def num_bytes(self) -> int:
        """Of all rings: tests hold this to its bound."""
        return sum(ring.num_bytes for ring in self._rings.values())

    def keep(self, row: KeptRow, *, has_failed: bool = False) -> None:
        """Remembers a request that has ended, until newer ones need its room. ``has_failed``: something failed on the
        way."""
        if len(row.model_text) > MAX_MODEL_BYTES:
            row = without_long_model(row)
        is_served = row.outcome == OK and not has_failed  # As nearly all requests are: it saves them a call.
        fate = _SERVED if is_served else fate_of(row, has_failed=has_failed)
        self._rings[fate].add(_encode(row))

    def find(self, name: str) -> list[KeptRequest]:
        """The requests with this request id or transfer id, newest first. Costs some ms: a look at all."""
        part = _encode(name)  # Its length comes first, so it is no part of a longer name.
        found = [request for ring in self._rings.values() for request in islice(_named(ring, part), MAX_FOUND)]
        return sorted(found, key=lambda request: -(request.ended_at_unix_s or 0.0))[:MAX_FOUND]

    def newest(self, fate: Fate, num: int) -> list[KeptRequest]:
        """The last ``num`` requests of this fate, or all if there are fewer, the newest first."""
        return [request_of(_decode(entry)) for entry in islice(self._rings[fate].newest(), num)]

    def since(self) -> dict[str, float]:
        """By fate, when its oldest remembered request ended, Unix seconds. Fates without one are left out."""
        oldest = {fate.value: ring.oldest for fate, ring in self._rings.items()}
        return {name: _decode(entry).ended_at_unix_s or 0.0 for name, entry in oldest.items() if entry is not None}


def _named(ring: Ring, part: bytes) -> Iterator[KeptRequest]:
    return (request_of(_decode(entry)) for entry in ring.holding(part) if _is_named(entry, part))


def _is_named(entry: bytes, part: bytes) -> bool:
    """Whether ``part`` is one of the two ids: it may be another field, too. Looks at the place of ``part``, and decodes
    nothing."""
    at = entry.find(part)
    return at == _NUM_HEAD_BYTES or (at > 0 and at == _NUM_HEAD_BYTES + _num_text_bytes(entry, _NUM_HEAD_BYTES))


def _num_text_bytes(entry: bytes, at: int) -> int:
    """The bytes of the text that begins at ``at``, with its head: msgpack's fixstr, str8, or str16."""
    first = entry[at]
    if first < 0xC0:
        return 1 + (first & 0x1F)
    return 2 + entry[at + 1] if first == 0xD9 else 3 + int.from_bytes(entry[at + 1 : at + 3])


def fate_of(row: KeptRow, *, has_failed: bool) -> Fate:
    """The ring where ``row`` belongs. Decode's error below 500 is a client's mistake."""
    if row.outcome == OK:
        return Fate.FAILED if has_failed else _SERVED
    is_mistake = row.outcome == Outcome.ENGINE_ERROR.value and (row.status or 500) < 500
    return Fate.REFUSED if row.outcome in _REFUSED or is_mistake else Fate.FAILED


def without_long_model(row: KeptRow) -> KeptRow:
    """The row, which is encoded then: a client's name for a model may be as long as a body."""
    return row if len(row.model_text) <= MAX_MODEL_BYTES else msgspec.structs.replace(row, model_text=_LONG_MODEL)


def request_of(row: KeptRow) -> KeptRequest:
    """The request of ``row``, as it is told."""
    return KeptRequest(
        request_id=row.request_id,
        transfer_id=row.transfer_id,
        trace_id=row.trace_id,
        client=row.client,
        client_address=row.client_address,
        model=_model_in(row.model_text),
        path=row.path.decode("latin-1"),
        is_stream=row.is_stream,
        ended_at_unix_s=row.ended_at_unix_s,
        total_s=_rounded(row.total_s),
        read_s=_rounded(row.read_s),
        turn_s=_rounded(row.turn_s),
        queue_s=_rounded(row.queue_s),
        status=row.status,
        outcome=row.outcome,
        error=row.error,
        revision=row.revision,
        is_local_prefill=row.is_local_prefill,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        moments=_moments_in(row.moments),
        ahead=_ahead_in(row.ahead),
    )


def with_alias(request: KeptRequest, aliases: Mapping[str, str]) -> KeptRequest:
    """``request``, with the model that its client's name stands for. ``aliases``: as they were when it came. No row
    remembers its own."""
    return msgspec.structs.replace(request, alias_of=aliases[request.model]) if request.model in aliases else request


def some_of(moments: Sequence[MomentPart]) -> Sequence[MomentPart]:
    """The moments that are remembered: of many the first and the last ones."""
    half = MAX_PARTS // 2
    return moments if len(moments) <= MAX_PARTS else (*moments[:half], *moments[-half:])


def reason_of(text: str) -> str:
    """A failure's reason, as it is remembered: no address, no token, not long."""
    return scrub(text)[:MAX_REASON_CHARS]


def _ahead_in(turns: tuple[Role, int, int, str] | None) -> QueueAhead | None:
    if turns is None:
        return None
    role, first, end, model = turns
    return QueueAhead(queue=role.value, model=model, first_turn=first, num_requests=end - first)


def _moments_in(parts: Sequence[MomentPart]) -> tuple[Moment, ...]:
    rows = [parts[begin : begin + _NUM_PARTS] for begin in range(0, len(parts), _NUM_PARTS)]
    moments = [msgspec.convert(row, Moment) for row in rows]
    return tuple(msgspec.structs.replace(moment, at_s=round(moment.at_s, 6)) for moment in moments)


def _model_in(text: bytes) -> str:
    if len(text) > MAX_MODEL_BYTES:
        text = _LONG_MODEL  # The request runs: ``keep`` has not cut it yet.
    try:
        return word_of(msgspec.json.decode(text, type=str)) if text else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _rounded(seconds: float | None) -> float | None:
    """In whole microseconds: no time that is measured here is more exact."""
    return None if seconds is None else round(seconds, 6)


_NUM_HEAD_BYTES: Final = 3
"""The bytes before the first field, in a row of more than 15 fields (msgpack's array 16)."""
_LONG_MODEL: Final = b'"?"'
_NUM_PARTS: Final = MAX_PARTS // MAX_MOMENTS
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(KeptRow).decode
