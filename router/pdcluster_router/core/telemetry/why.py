"""The reasons why a request went as it did: cause and cure in plain words, from what a router remembers of it.

``WORDS`` has what each kind of failure and each code of an error means. ``docs/operations.md`` says more of each kind.
Decides from one ``KeptRequest`` alone, whether a router remembers it or an access log has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from pdcluster_protocol.kept import KeptRequest, Milestone, Moment

OK: Final = "ok"
"""The outcome of a request that was served whole."""


@dataclass(frozen=True, slots=True)
class Words:
    """``cause``: a sentence without its full stop; the engine and the reason follow. ``cure``: whole sentences."""

    cause: str
    cure: str


def explained(request: KeptRequest) -> KeptRequest:
    """The request, with its cause and cure."""
    words = explain(request)
    return replace(request, cause=words.cause, cure=words.cure)


def explained_by(whole: KeptRequest, part: KeptRequest) -> KeptRequest:
    """A request in parts that has not ended, with the cause and cure of the part that it waits for most."""
    words = explain(part)
    return replace(whole, cause=f"of its part {part.request_id}: {words.cause}", cure=words.cure)


def furthest_behind(parts: Iterable[KeptRequest]) -> KeptRequest | None:
    """Of parts that run, the one that is furthest behind. A part whose last step is not the first byte of its answer is
    behind all others; of equals, the part whose last step is the longest ago. None: there are no parts.
    """
    return min(parts, key=_progress, default=None)


def _progress(part: KeptRequest) -> tuple[bool, float]:
    """Whether the answer flows, and when the last step was, in seconds since the request came."""
    if not part.moments:
        return False, 0.0
    last = part.moments[-1]
    return last.what == Milestone.FIRST_BYTE.value, last.at_s


def explain(request: KeptRequest) -> Words:
    """Cause and cure; both empty for a request that went well at once."""
    if not request.outcome and request.ended_at_unix_s is None:
        return _so_far(request)
    failures = failures_of(request)
    if request.outcome == OK:
        return _made_good(failures[-1]) if failures else NOTHING
    found = _decisive(request, failures)
    words = _words_for(request, found)
    return Words(_with_details(words.cause, found), words.cure)


def failures_of(request: KeptRequest) -> list[Moment]:
    """The moments that are failures."""
    return [moment for moment in request.moments if moment.what not in _PROGRESS]


def _decisive(request: KeptRequest, failures: list[Moment]) -> Moment | None:
    """The last failure that the client's error names. If there is none: the last that does not follow from others."""
    named = [moment for moment in failures if moment.what == request.error]
    found = named or [moment for moment in failures if moment.what not in _FOLLOWING] or failures
    return found[-1] if found else None


def _words_for(request: KeptRequest, found: Moment | None) -> Words:
    for name in (found.what if found is not None else "", request.error, request.outcome):
        if name in WORDS:
            return WORDS[name]
    return _ENDS.get(request.outcome, _FAILED)


def _with_details(cause: str, found: Moment | None) -> str:
    if found is None:
        return cause
    engine = f" ({found.engine})" if found.engine else ""
    return f"{cause}{engine}{': ' if found.reason else ''}{found.reason}"


def _made_good(failure: Moment) -> Words:
    words = WORDS.get(failure.what, _FAILED)
    return Words(
        f"it was served, after a failure that was made good. {_with_details(words.cause, failure)}", words.cure
    )


def _so_far(request: KeptRequest) -> Words:
    """Cause and cure of a request that has not ended: what it waits for."""
    if not request.moments:
        return _QUEUED
    last = request.moments[-1]
    is_alone = last.what == Milestone.DECODE_SENT.value and request.is_local_prefill
    waits = _WAITS.get(Milestone.PREFILLS_LOCALLY.value if is_alone else last.what, _RETRIES)
    return Words(f"{waits.cause} ({last.engine})" if last.engine else waits.cause, waits.cure)


NOTHING: Final = Words("", "")
_PROGRESS: Final = frozenset(one.value for one in Milestone)
_FOLLOWING: Final = frozenset(("no_decode", "prefill_exhausted"))
"""Failures that follow from other failures, if the request has any."""
_FAILED: Final = Words("the router failed on it", "It is a bug of the router: look for `request failed` in its log.")
_QUEUED: Final = Words(
    "it waits in the router's queue until prefill has room",
    "Look at the backlog and the engines' states on /pdcluster/pool. Too few prefill engines: add some.",
)
_RETRIES: Final = Words("a try has failed and another one begins", "Ask again in a moment.")
_LOOK_AT_DECODE: Final = "Look at that engine's queue (`vllm:num_requests_waiting`), its KV cache usage and its log."
_WAITS: Final = {
    Milestone.DECODE_SENT.value: Words(
        "it waits for the decode engine, which has made no reservation", _LOOK_AT_DECODE
    ),
    Milestone.RESERVED.value: Words("it waits for a prefill engine to be chosen", "Ask again in a moment."),
    Milestone.PREFILLS_LOCALLY.value: Words("the decode engine computes the prompt itself", _LOOK_AT_DECODE),
    Milestone.PREFILL_SENT.value: Words(
        "it waits for the prefill engine",
        "A long prompt takes seconds. Else look at that engine's queue (`vllm:num_requests_waiting`) and its log.",
    ),
    Milestone.PREFILL_REPLIED.value: Words("prefill is done; it waits for decode's first token", _LOOK_AT_DECODE),
    Milestone.FIRST_BYTE.value: Words("its answer flows", "Nothing is wrong as long as the answer grows."),
    "prefill_exhausted": Words(
        "no prefill attempt is left; decode was told so, and computes the prompt itself or gives it up", _LOOK_AT_DECODE
    ),
    "reservation_lost": Words("decode has hung up on its reservation; its answer is waited for", _LOOK_AT_DECODE),
}
"""By the name of the request's last moment."""

_PREFILL: Final = "Read that prefill engine's log by the transfer id. If many requests name this engine, take it out."
_OVERLOAD: Final = "Too many requests for these prefill engines: add some, or limit the clients. The client may retry."
_CLIENT: Final = "The client has to change the request: the error that it got says what is wrong with it."
_SIZE: Final = "Send less at once, or raise the router's limit that the error names."
_KEY_LIMIT: Final = (
    "The client may send less, or later. Else raise its limit in the file of keys, or that of `defaults` there."
)
_RETRY: Final = "The client may send it again: the answer has Retry-After."

WORDS: Final[dict[str, Words]] = {
    # Kinds of failures.
    "prefill_failed": Words("the prefill engine refused, answered an error, or was cut off", _PREFILL),
    "prefill_timeout": Words(
        "the prefill engine did not answer within prefill_timeout_s",
        "It hangs or has too much to do: look at its queue; restart it if that does not move.",
    ),
    "attempt_lost": Words(
        "decode says that the KV of an attempt would not be complete",
        "Look at the network between these two engines. Many with one prefill engine: that engine's link.",
    ),
    "prefill_exhausted": Words(
        "no prefill attempt was left",
        "Prefill engines are down, or all fail: see what each attempt says, and bring them back.",
    ),
    "reservation_lost": Words(
        "decode hung up before its prefill was over",
        "It gave the request up or crashed: read that decode engine's log by the transfer id.",
    ),
    "reservation_refused": Words(
        "the router refused decode's reservation",
        "Engines and router are of different versions, or --advertise-url leads to another router.",
    ),
    "bad_token": Words(
        "a call to the router had no valid seal or token", "Give router and engines the same PDCLUSTER_SECRET."
    ),
    "decode_unreached": Words(
        "the decode engine could not be connected to", "It is down or starts: look at its pod, then at its log."
    ),
    "decode_lost": Words(
        "the decode engine broke off before its answer was whole",
        "Look for a crash at the end of that engine's log, out of memory first. The client may retry.",
    ),
    "decode_error": Words(
        "the decode engine answered an error of its own",
        "Read that engine's log by the request id. `transfer_refused` there: another secret or version.",
    ),
    "no_decode": Words(
        "no decode engine was left to ask", "Decode is down: see which engines serve on /pdcluster/pool, and why not."
    ),
    "deadline": Words(
        "its time was over",
        "The step in which it was is the slow one. Waiting to be admitted: add prefill engines. Else look at that "
        "step's engine, or give requests more time (--first-byte-timeout, --request-timeout, X-Request-Timeout).",
    ),
    "decode_stalled": Words(
        "the decode engine had begun its answer and sent no more",
        "That engine hangs: look at its log and its device, and restart it.",
    ),
    "client_stalled": Words(
        "the client took nothing of its answer for too long",
        "The client hangs, or a proxy between it and the router does.",
    ),
    "client_gone": Words(
        "the client left before its answer was whole",
        "If it did not mean to: its own timeout, or a proxy's, is shorter than the answer takes.",
    ),
    "withdrawn": Words(
        "it was one part of a request that had ended: another part failed, or the client left",
        "Ask for the whole request: its id is this one without the last hyphen and number.",
    ),
    "queue_full": Words("too many requests waited for prefill already", _OVERLOAD),
    "queue_timeout": Words("prefill had no room for it within queue_timeout_s", _OVERLOAD),
    "no_room": Words(
        "requests that wait for an answer, or answers that clients do not take, fill the router's max_buffered_bytes",
        "One client with large bodies: limit it. Many: add routers, or raise --max-buffered-bytes.",
    ),
    "too_many_connections": Words(
        "clients have more connections than max_connections", "See who holds so many. Else add routers."
    ),
    "crowded_out": Words(
        "the internal port had too many connections, or no room for a call",
        "See who holds so many without a call that waits: engines hold few. A NetworkPolicy keeps others out.",
    ),
    "tls_refused": Words(
        "a connection to the client port, or to the internal port, came to no TLS agreement",
        "See that clients ask https:// and trust the certificate, and that the certificate file holds the intermediate "
        "certificates.",
    ),
    "proxy_refused": Words(
        "a connection to the client port did not begin with a trusted proxy's PROXY header",
        "See that --trusted-proxies names all load balancers, and that each writes the header.",
    ),
    "engine_tls_refused": Words(
        "the router and an engine came to no TLS agreement",
        "The reason names the engine, what was expected and what was found, and the cure.",
    ),
    "draining": Words("the router was shutting down", _RETRY),
    "stopped": Words(
        "the router was stopped before the answer was whole",
        "The client may send it again. If answers take longer than the drain time, raise --drain-timeout.",
    ),
    # Codes of errors that are no such kind.
    "invalid_request": Words("its body is no request", _CLIENT),
    "invalid_http": Words("it is not the HTTP that this router serves", _CLIENT),
    "invalid_timeout": Words("its X-Request-Timeout is no number of seconds", _CLIENT),
    "invalid_api_key": Words(
        "it showed no API key that this router knows",
        "Give the client a key of the --api-key-file. After a change the router takes seconds to see it.",
    ),
    "invalid_token": Words(
        "it showed no token (JWT) that this router takes",
        "The error that the client got names the claim, both values and the cure. Most often the token has expired.",
    ),
    "no_token_keys": Words(
        "the router had not got the keys of the identity provider yet",
        "Look for `token keys not read` in the router's log: it says why. The client may send it again.",
    ),
    "too_many_running": Words("its client had max_concurrent requests at once already", _KEY_LIMIT),
    "too_many_requests": Words("its client had used up its requests_per_minute", _KEY_LIMIT),
    "too_many_tokens": Words("its client had used up its prompt_tokens_per_minute", _KEY_LIMIT),
    "prompt_over_limit": Words("its prompt alone is above its client's prompt_tokens_per_minute", _KEY_LIMIT),
    "model_not_found": Words(
        "no engine serves the model that it asked for",
        "The error that the client got names the models that there are. A new adapter is known within seconds.",
    ),
    "messages_not_served": Words("these engines do not serve Anthropic's API", "Use /v1/chat/completions."),
    "responses_not_served": Words(
        "these engines, or its gateway, do not show whether an answer of /v1/responses is whole",
        "Use /v1/chat/completions.",
    ),
    "body_too_large": Words("its body is larger than max_body_bytes", _SIZE),
    "headers_too_large": Words("its headers are larger than max_header_bytes", _SIZE),
    "too_many_headers": Words("it has too many headers", _SIZE),
    "expectation_failed": Words("it has an Expect header that is not 100-continue", _CLIENT),
    "client_too_slow": Words(
        "it did not arrive whole within client_read_timeout_s",
        "The client's network is slow, or the client stopped in the middle.",
    ),
    "deadline_passed": Words("its time was over", "Look at the step that took longest."),
    "stalled": Words("no byte of its answer moved for idle_timeout_s", "Look at that decode engine and at the client."),
    "internal_error": _FAILED,
    "bad_gateway_mode": Words(
        "its gateway asked the picker in a way that no picker can serve",
        "Set the gateway's filter up as docs/gateway.md says.",
    ),
    "no_decode_engine": Words(
        "no decode engine could be reached", "See which engines serve on /pdcluster/pool, and why not."
    ),
    "answer_head_too_large": Words(
        "the decode engine answered with more bytes of headers than the router takes",
        "The client has to ask for less at once, or embeddings as `float` or `base64`.",
    ),
    "engine_error": Words(
        "the decode engine refused it with an error of its own, which the client has got",
        "A status below 500: the client has to change the request. Else read that engine's log by the request id.",
    ),
}

_STATUS: Final = "An access log does not say why. The error that the client got does, and its status: "
_ENDS: Final = {
    "rejected": Words(
        "the router refused it", f"{_STATUS}401 is a key or a token, 413 or 431 a size, 503 a lack of room."
    ),
    "limited": Words("its client has asked for too much", _KEY_LIMIT),
    "overloaded": Words("prefill had no room for it", _OVERLOAD),
    "unavailable": Words("no engine could be reached", WORDS["no_decode_engine"].cure),
    "lost": Words("it was broken off before its answer was whole", "Look for its request id in the routers' logs."),
    "timeout": Words("its time was over", "Look at the step that took longest."),
}
"""By outcome, of a request whose error and failures are not known, as in an access log."""
