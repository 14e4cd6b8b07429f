"""A request as a router remembers it. ``GET /pdcluster/requests?id=ID`` on the internal port asks for it.

A kept request has no prompt, answer, key or header. Its only IP address is the client's, and it has that only if the
router writes an access log. The router words ``cause`` and ``cure`` when it is asked. A reader ignores fields that it
does not know.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final, TypeAlias
from urllib.parse import quote

import msgspec

REQUESTS_PATH: Final = "/pdcluster/requests"
MAX_FOUND: Final = 20
"""Most requests in an answer about one id: a client may give the same id to all its requests."""
MAX_LINES_AHEAD: Final = 4
_RESPONSE_PREFIXES: Final = ("chatcmpl-", "cmpl-")
UnixSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, lt=253402300800.0)]
"""Until the end of the year 9999, the last that ``datetime`` has."""


def path_for(name: str) -> str:
    """The path and query that ask for requests by this id."""
    return f"{REQUESTS_PATH}?id={quote(name, safe='', errors='replace')}"


def names_for(name: str) -> tuple[str, ...]:
    """The ids that ``name`` may mean: itself, and itself without the prefix that vLLM puts before a request's id.

    Empty: no id looks like ``name``.
    """
    prefix = next((one for one in _RESPONSE_PREFIXES if name.startswith(one)), "")
    return tuple(one for one in dict.fromkeys((name, name[len(prefix) :])) if one and one.isascii())


class Milestone(Enum):
    """A moment of a request that is no failure. ``Moment.what`` has its value."""

    __hash__ = object.__hash__

    DECODE_SENT = "decode_sent"
    RESERVED = "reserved"
    """Decode has made its reservation."""
    PREFILLS_LOCALLY = "prefills_locally"
    """Decode says that it computes the missing tokens itself."""
    PREFILL_SENT = "prefill_sent"
    PREFILL_QUEUED = "prefill_queued"
    """The request is in the queue of the prefill engine's scheduler. Only of waits that are worth a row."""
    PREFILL_COMPUTES = "prefill_computes"
    """Its first step is scheduled. Prefill tells both as it replies, so they are unknown until then."""
    PREFILL_REPLIED = "prefill_replied"
    """Prefill says that it has done its part."""
    FIRST_BYTE = "first_byte"
    """Decode's first body byte has come."""


class Moment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One thing that has happened to a request: a milestone, or a kind of failure."""

    at_s: float
    """Seconds since the request arrived."""
    what: str
    engine: str = ""
    attempt: int = 0
    """Number of the prefill attempt; 0: the moment belongs to none."""
    reason: str = ""
    """Why, if the moment is a failure."""


class LineAhead(msgspec.Struct, frozen=True, gc=False):
    """The requests of one client that were let in while another one waited."""

    client: str
    """Name of the API key, or ``jwt:`` and the name of the token's client; empty: the router asks for neither."""
    num_requests: int
    num_tokens: int
    """As admission counts them."""


class QueueAhead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The requests that were let in from a router's queue while one waited there."""

    queue: str
    """Role of the engines that they waited for."""
    model: str = ""
    """The base model of these engines; empty: it was the shared queue."""
    first_turn: int
    """Number of the first of them, counted over all requests that were let in since the router's start."""
    num_requests: int
    num_known: int = 0
    """How many of them the router still remembers: the last ones."""
    lines: tuple[LineAhead, ...] = ()
    """The remembered ones by client: those with the most tokens, ``MAX_LINES_AHEAD`` at most."""
    num_other_keys: int = 0
    """How many clients of remembered requests are not in ``lines``."""


class KeptRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request. Seconds count from its arrival."""

    request_id: str
    """The ``x-request-id`` of its answer."""
    transfer_id: str = ""
    """The newest transfer id; both engines have it in their logs."""
    trace_id: str = ""
    """The trace id in the client's ``traceparent``, or of the router's own spans."""
    client: str = ""
    """As in the access log."""
    client_address: str = ""
    """IP address of the client; empty where the router has no access log."""
    model: str = ""
    """As the client named it."""
    alias_of: str = ""
    """The model that this name stands for by ``--model-alias``, whose name engines got; empty: it is no alias."""
    method: str = "POST"
    """Routers remember no requests of other methods."""
    path: str = ""
    is_stream: bool | None = None
    """None: its body was not read."""
    ended_at_unix_s: UnixSeconds | None = None
    """None: it has not ended."""
    total_s: float | None = None
    """Until the end of its answer, or until now."""
    read_s: float | None = None
    """The time before its arrival: from its first byte to its last one, or to its refusal; None: it is not known."""
    turn_s: float | None = None
    """The time between its last byte and its arrival, in which it waited for earlier requests of its connection, or for
    large bodies of other requests; None: it did not wait."""
    queue_s: float | None = None
    """Until it was admitted, or turned away."""
    status: int | None = None
    """HTTP status that the client was sent; None: the client has no answer, or only a part."""
    outcome: str = ""
    """A value of the label ``outcome`` of ``pdcluster_router_requests_total``; empty: it has none yet."""
    error: str = ""
    """Code of the error that ended it."""
    revision: str = ""
    """The revision of its engines."""
    is_local_prefill: bool | None = None
    """True: decode computes the prompt itself; None: no engine was asked."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that decode had in its prefix cache."""
    moments: tuple[Moment, ...] = ()
    """In the order in which they came."""
    ahead: QueueAhead | None = None
    """The requests whose turn was before its own; None: it did not wait in the queue."""
    cause: str = ""
    """Why it failed, or what delayed it; empty: neither."""
    cure: str = ""
    """The thing to do about it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The ids by which a caller may ask for it."""
        return (self.request_id, self.transfer_id)


class KeptAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A router's answer about one id. Empty ``requests``: the router remembers no request with this id."""

    requests: tuple[KeptRequest, ...] = ()
    """The newest one first: clients may use an id twice."""
    engines: dict[str, str] = {}
    """Engine to its pod, or else its URL: for the engines in ``requests`` that the router still knows."""
    since_unix_s: dict[str, UnixSeconds] = {}
    """By ``served`` (whole), ``refused`` and ``failed``: the end of the oldest such request that is remembered."""
