"""The spans of one request that has ended, from what a router remembers of it: docs/decisions/0042-spans.md.

    POST /v1/chat/completions   SERVER    from its first byte to the end of its answer; each failure is an event of it
      receive, turn, queue                before the first engine is asked
      decode                    CLIENT    one call to a decode engine; an engine's own spans are its children
        reservation, first_token or local_prefill, answer
      prefill                   CLIENT    one attempt of a prefill engine

A request in parts has a span for each part, and a part has the calls. No span has a prompt, an answer, a key or a
header. Knows no clock and no encoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Final, TypeAlias

import msgspec

from pdcluster_protocol.kept import KeptRequest, Milestone, Moment
from pdcluster_router.core.telemetry.request_trace import SpanIds
from pdcluster_router.core.telemetry.span_calls import EngineCall, calls_in
from pdcluster_router.core.telemetry.why import OK, failures_of

Attributes: TypeAlias = Mapping[str, str | int | float | bool]
ENGINE_REFUSED: Final = "engine_error"
"""The code of a request that its decode engine has refused; a test holds it to ``openai_errors.py``."""


class SpanKind(Enum):
    """The relation of a span to the spans around it."""

    __hash__ = object.__hash__

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class SpanEvent(msgspec.Struct, frozen=True):
    """Something that happened at one moment of a span."""

    at_s: float
    name: str
    attributes: Attributes


class TraceSpan(msgspec.Struct, frozen=True):
    """One span. Times are seconds since the request arrived."""

    name: str
    kind: SpanKind
    span_id: int
    parent_id: int
    """0: none."""
    begin_s: float
    end_s: float
    attributes: Attributes = {}
    error: str = ""
    """The kind of failure that it ended with; empty: it ended well."""
    events: Sequence[SpanEvent] = ()


def spans_of(request: KeptRequest, ids: SpanIds, *, scheme: str, num_parts: int = 0) -> list[TraceSpan]:
    """All spans of ``request``, its own first. ``scheme``: of the client's URL. ``num_parts``: above 0 for a request in
    parts, which tell of their calls themselves."""
    end_s = max(0.0, request.total_s or 0.0)
    calls = [] if num_parts else calls_in(request.moments, end_s, _refusal_of(request))
    steps = _Steps(ids)
    before = [] if ids.is_part else list(_before(request, steps))
    queue = [] if num_parts else list(_queue(request, end_s, steps))
    of_calls = [span for number, call in enumerate(calls, 1) for span in _spans_of_call(call, number, ids, steps)]
    begin_s = before[0].begin_s if before else 0.0
    own = _part(request, ids, end_s) if ids.is_part else _server(request, ids, (begin_s, end_s), scheme, num_parts)
    return [own, *before, *queue, *of_calls]


class _Steps:
    """Makes the spans of steps, and numbers them."""

    def __init__(self, ids: SpanIds) -> None:
        self._ids = ids
        self._num_made = 0

    def span(self, name: str, begin_s: float, end_s: float, parent_id: int = 0) -> TraceSpan:
        """``parent_id``: 0: the request itself."""
        self._num_made += 1
        span_id = self._ids.step(self._num_made - 1)
        return TraceSpan(name, SpanKind.INTERNAL, span_id, parent_id or self._ids.span_id, begin_s, max(begin_s, end_s))


def _server(request: KeptRequest, ids: SpanIds, times: tuple[float, float], scheme: str, num_parts: int) -> TraceSpan:
    attributes = {**_http_attributes(request, scheme), **_model_attributes(request), **_own_attributes(request)}
    if num_parts:
        attributes["pdcluster.parts"] = num_parts
    error = _error_of(request)
    if error:
        attributes["error.type"] = error
    return TraceSpan(
        f"{request.method} {request.path}",
        SpanKind.SERVER,
        ids.span_id,
        ids.parent_id,
        *times,
        attributes,
        error if _is_servers_error(request) else "",
        _events(request, times),
    )


def _part(request: KeptRequest, ids: SpanIds, end_s: float) -> TraceSpan:
    error = _error_of(request)
    attributes = {**_own_attributes(request), **({"error.type": error} if error else {})}
    events = _events(request, (0.0, end_s))
    return TraceSpan("part", SpanKind.INTERNAL, ids.span_id, ids.parent_id, 0.0, end_s, attributes, error, events)


def _before(request: KeptRequest, steps: _Steps) -> Iterator[TraceSpan]:
    turn_s = max(0.0, request.turn_s or 0.0)
    if request.read_s is not None:
        yield steps.span("receive", 0.0 - turn_s - max(0.0, request.read_s), 0.0 - turn_s)
    if turn_s:
        yield steps.span("turn", -turn_s, 0.0)


def _queue(request: KeptRequest, end_s: float, steps: _Steps) -> Iterator[TraceSpan]:
    if request.queue_s is not None:
        yield steps.span("queue", 0.0, min(max(0.0, request.queue_s), end_s))


def _spans_of_call(call: EngineCall, number: int, ids: SpanIds, steps: _Steps) -> Iterator[TraceSpan]:
    span_id = ids.call(number)
    attributes: dict[str, str | int] = {"pdcluster.engine": call.engine, "pdcluster.role": call.role.value}
    if call.attempt:
        attributes["pdcluster.attempt"] = call.attempt
    if call.error:
        attributes["error.type"] = call.error
    name = call.role.value
    yield TraceSpan(name, SpanKind.CLIENT, span_id, ids.span_id, call.begin_s, call.end_s, attributes, call.error)
    for step in call.steps:
        yield steps.span(step.name, step.begin_s, step.end_s, span_id)


def _http_attributes(request: KeptRequest, scheme: str) -> dict[str, str | int | float | bool]:
    """As OpenTelemetry's conventions for HTTP name them."""
    found: dict[str, str | int | None] = {
        "http.request.method": request.method,
        "http.route": request.path,
        "url.path": request.path,
        "url.scheme": scheme,
        "http.response.status_code": request.status,
        "client.address": request.client_address or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _model_attributes(request: KeptRequest) -> dict[str, str | int | float | bool]:
    """As OpenTelemetry's conventions for generative AI name them. Only one span of a trace has them, so that a sum of
    tokens over all spans is right."""
    is_stream = bool(request.is_stream)
    found: dict[str, str | int | float | None] = {
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.operation.name": OPERATIONS.get(request.path),
        "gen_ai.request.model": request.model or None,
        "gen_ai.request.stream": request.is_stream,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        "gen_ai.response.time_to_first_chunk": _first_byte_s(request.moments) if is_stream else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _own_attributes(request: KeptRequest) -> dict[str, str | int | float | bool]:
    found = {
        "pdcluster.request_id": request.request_id,
        "pdcluster.transfer_id": request.transfer_id,
        "pdcluster.client": request.client,
        "pdcluster.revision": request.revision,
        "pdcluster.outcome": request.outcome,
    }
    return {name: value for name, value in found.items() if value}


def _events(request: KeptRequest, times: tuple[float, float]) -> list[SpanEvent]:
    return [SpanEvent(_within(moment.at_s, times), moment.what, _facts_of(moment)) for moment in failures_of(request)]


def _facts_of(failure: Moment) -> Attributes:
    """Without the reason: it may quote an engine, and a collector is not ours. ``pdcluster why`` tells it."""
    found: dict[str, str | int] = {
        "pdcluster.engine": failure.engine,
        "pdcluster.attempt": failure.attempt,
    }
    return {name: value for name, value in found.items() if value}


def _error_of(request: KeptRequest) -> str:
    return "" if request.outcome == OK else request.error or request.outcome or "unknown"


def _is_servers_error(request: KeptRequest) -> bool:
    """Whether the span's status is an error. A status of 400 to 499 is the client's: the conventions leave it unset."""
    return request.outcome != OK and not (request.status is not None and 400 <= request.status < 500)


def _refusal_of(request: KeptRequest) -> str:
    """The kind of error with which the last decode engine has refused the request; empty: it has not."""
    is_refused = request.error == ENGINE_REFUSED and request.status is not None and request.status >= 400
    return str(request.status) if is_refused else ""


def _first_byte_s(moments: Sequence[Moment]) -> float | None:
    return next((moment.at_s for moment in reversed(moments) if moment.what == _FIRST_BYTE), None)


def _within(at_s: float, times: tuple[float, float]) -> float:
    return min(max(at_s, times[0]), times[1])


_PROVIDER: Final = "vllm"
_FIRST_BYTE: Final = Milestone.FIRST_BYTE.value
OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    **dict.fromkeys(("/v1/embeddings", "/v2/embed"), "embeddings"),
    **dict.fromkeys(("/score", "/v1/score"), "score"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "rerank"),
    "/classify": "classify",
    "/pooling": "pooling",
}
"""OpenTelemetry's own names, and, where it has none, the path's last word."""
