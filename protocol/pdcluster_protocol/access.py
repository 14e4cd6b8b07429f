"""A line of the access log. A router writes one for each request that has ended, and ``pdcluster why`` reads it.

``docs/operations.md`` explains the fields. No field has a body, a key, a header or a query, and the only IP address is
the client's. A reader ignores fields that it does not know.
"""

from __future__ import annotations

from datetime import datetime

import msgspec


class AccessLine(msgspec.Struct, kw_only=True, tag_field="event", tag="access"):
    """One request. The router's cycle or page fills the line in. Seconds count from the request's arrival unless a
    field says otherwise. A time is None if the request did not come so far.

    A request arrives when it is read whole and its turn on its connection has come, or earlier if it is refused.
    """

    ts: datetime | None = None
    """When the request ended, UTC."""
    request_id: str = ""
    """The answer's ``x-request-id``; empty for bytes that are no HTTP."""
    transfer_id: str = ""
    """The newest transfer id, which trace lines and connectors' logs have too; empty: the request had none."""
    trace_id: str = ""
    """The trace id in the client's ``traceparent``, or of the router's own spans; empty: there is neither."""
    client: str = ""
    """Name of the API key, or ``jwt:`` and the name of the token's client; empty: none was asked for, or none was
    valid."""
    client_address: str = ""
    """IP address of the client, as far as trusted proxies tell it: decision 0034. Empty where it is not known."""
    method: str = ""
    path: str = ""
    """Without the query."""
    model: str = ""
    """As the client named it; empty: the client named none."""
    alias_of: str = ""
    """The model that this name stands for by ``--model-alias``, whose name engines got; empty: it is no alias."""
    is_stream: bool | None = None
    """Whether the client asked for a stream; None: its body was not read."""
    status: int | None = None
    """HTTP status that the client was sent; None: the client left before. A stream that broke off later has 200."""
    outcome: str | None = None
    """A value of the label ``outcome`` of ``pdcluster_router_requests_total``; None: a bug, and the router logs the
    error."""
    failures: tuple[str, ...] = ()
    """Failures of this request, by kind in ``pdcluster_router_failures_total``; also those from which it recovered."""
    parts: int = 1
    """The number of its parts, the requests to engines: one for each of its sequences, or one for all."""
    decode_engine: str = ""
    """The last decode engine that got the request, by its name on ``/pdcluster/pool``. If the request has several
    parts: that of each part, with commas between them."""
    prefill_engine: str = ""
    """The last prefill engine that got the request, likewise; empty: none got it."""
    revision: str = ""
    """The revision of both engines."""
    is_local_prefill: bool | None = None
    """Whether decode computes the prompt itself: because of the request's kind, or because decode lacks few tokens."""
    decode_attempts: int = 0
    """How often it was sent to a decode engine."""
    prefill_attempts: int = 0
    """How often it was sent to a prefill engine."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that decode had in its prefix cache."""
    output_tokens: int | None = None
    """From ``usage`` in decode's answer; None: the answer has none, like a stream whose client did not ask for it."""
    events: int | None = None
    """Events of a stream, without ``[DONE]``."""
    bytes_in: int = 0
    """Bytes of the request's body."""
    bytes_out: int = 0
    """Bytes of the answer's body, without keep-alives."""
    read_s: float | None = None
    """From the request's first byte to its arrival."""
    queue_s: float | None = None
    """Until it was admitted, or turned away."""
    reservation_s: float | None = None
    """Until decode's reservation."""
    prefill_s: float | None = None
    """From the newest order to prefill to its answer."""
    first_byte_s: float | None = None
    """Until the first byte of the answer went to the client."""
    gap_p50_s: float | None = None
    """The median time between two chunks of a stream, within 7.5 %."""
    gap_max_s: float | None = None
    """The longest time between two chunks."""
    total_s: float | None = None
    """Until the end."""
