"""A line of the access log: what a router writes of a request that has ended, and what ``pdcluster why`` reads of it.

``docs/operations.md`` explains the fields. No body, key, header or query is in any of them, and no address but the
client's. A reader ignores fields that it does not know.
"""

from __future__ import annotations

from datetime import datetime

import msgspec


class AccessLine(msgspec.Struct, kw_only=True, tag_field="event", tag="access"):
    """One request; its cycle or page fills it in. Seconds count from its arrival, unless they say otherwise, and are
    None where it did not come so far.

    It has arrived when it is whole and its turn on its connection, or when it is refused before that.
    """

    ts: datetime | None = None
    """When it ended, UTC."""
    request_id: str = ""
    """The one that came back as ``x-request-id``; empty for bytes that are no HTTP."""
    transfer_id: str = ""
    """The newest one, by which trace lines and connectors' logs are joined; empty before there is one."""
    trace_id: str = ""
    """Of the client's ``traceparent``; empty where it gave none that is valid."""
    client: str = ""
    """Name of the API key that was shown; empty where none is asked for, or none was valid."""
    client_address: str = ""
    """IP address of the client, as far as trusted proxies tell it: decision 0034. Empty where it is not known."""
    method: str = ""
    path: str = ""
    """Without the query."""
    model: str = ""
    """The client's word; empty where it gave none."""
    is_stream: bool | None = None
    """Whether the client asked for a stream; None: its body was not read."""
    status: int | None = None
    """HTTP status that the client was sent; None: it left before. A stream that broke off later has 200."""
    outcome: str | None = None
    """A label of ``pdcluster_router_requests_total``; None: a bug of the router, which its log tells."""
    failures: tuple[str, ...] = ()
    """Kinds of ``pdcluster_router_failures_total`` on the way, those that were made good too."""
    decode_engine: str = ""
    """The last one that it was sent to, by its name on ``/pdcluster/pool``."""
    prefill_engine: str = ""
    """Likewise; empty where decode needed none."""
    revision: str = ""
    """Of both."""
    is_local_prefill: bool | None = None
    """Whether decode computes the prompt by itself, for its kind or because so little of it is left to compute."""
    decode_attempts: int = 0
    """How often it was sent to a decode engine."""
    prefill_attempts: int = 0
    """How often it was sent to a prefill engine."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt, those that decode had in its prefix cache."""
    output_tokens: int | None = None
    """Decode's ``usage``; None where its answer has none, as a stream whose client did not ask for it."""
    events: int | None = None
    """Of a stream, without ``[DONE]``."""
    bytes_in: int = 0
    """Of its body."""
    bytes_out: int = 0
    """Of its answer's body, without keep-alives."""
    read_s: float | None = None
    """From its head to its arrival."""
    queue_s: float | None = None
    """Until it was admitted, or turned away."""
    reservation_s: float | None = None
    """Until decode's reservation."""
    prefill_s: float | None = None
    """From the newest order to prefill to its answer."""
    first_byte_s: float | None = None
    """Until the first byte of the answer went to the client."""
    gap_p50_s: float | None = None
    """Of a stream, the median time between two chunks, within 7.5 %."""
    gap_max_s: float | None = None
    """The longest such time."""
    total_s: float | None = None
    """Until the end."""
