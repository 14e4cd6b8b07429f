"""Writes a kept request as text for a person: where it was when, how it ended, why, and what to do.

R-7 failed: 502 prefill_failed after 3.214 s, 2026-11-26 08:41:12 UTC (told by router-1)
POST /v1/completions, stream, model m, key team-a, transfer 5d41402abc4b2a76b9719d911017c592

       at       took
 -0.001 s    0.001 s  its head and body come
  0.000 s    0.000 s  waits to be admitted
  0.000 s    0.002 s  sent to decode-0
  0.002 s    3.210 s  attempt 1: sent to prefill-0
  3.214 s             ended

cause: ...
cure:  ...
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from pdcluster_protocol.kept import KeptRequest, QueueAhead
from pdcluster_router.core.telemetry.scrub import printable
from pdcluster_router.core.telemetry.timeline import timeline_of

OK: Final = "ok"
"""Outcome of a request that was served whole."""


def describe(request: KeptRequest, engines: Mapping[str, str], source: str) -> str:
    """The whole text. ``engines``: pod or URL by name; ``source``: the router or file that told of the request."""
    parts = [f"{_headline(request)} (told by {source})", _facts(request), "", *_timeline(request)]
    known = {moment.engine for moment in request.moments} & engines.keys()
    if known:
        parts += ["", ", ".join(f"{name} is {engines[name]}" for name in sorted(known))]
    if request.ahead is not None:
        parts += ["", f"ahead: {_ahead(request.ahead, request.client)}"]
    if request.cause:
        parts += ["", f"cause: {request.cause}", f"cure:  {request.cure}"]
    return "\n".join(map(printable, parts))


def duration(seconds: float) -> str:
    """The time in the largest unit of which it has at least two, else in seconds. A time below 0 is shown as 0 s: our
    clock may be behind a router's."""
    seconds = max(seconds, 0.0)
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _headline(request: KeptRequest) -> str:
    took = "" if request.total_s is None else f" {request.total_s:.3f} s"
    if request.ended_at_unix_s is None and not request.outcome:
        return f"{request.request_id} has not ended: it runs for{took}"
    status = str(request.status) if request.status is not None else "no status"
    result = "went well" if request.outcome == OK else f"failed: {status} {request.error or request.outcome}".rstrip()
    return f"{request.request_id} {result}{' after' if took else ''}{took}, {_end(request.ended_at_unix_s)}"


def _end(at_unix_s: float | None) -> str:
    if at_unix_s is None:
        return "and prefill's own reply is still to come"
    return datetime.fromtimestamp(at_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _ahead(ahead: QueueAhead, own: str) -> str:
    """The requests that were let in while this one, of the key ``own``, waited in the queue."""
    if not ahead.num_requests:
        return "no other request was let in while it waited in the queue"
    said = f"{_number(ahead.num_requests, 'request')} let in while it waited in the queue"
    if not ahead.num_known:
        return f"{said}; whose they were is not remembered any more"
    of = ":" if ahead.num_known >= ahead.num_requests else f"; of the last {ahead.num_known}:"
    lines = [f"{line.num_requests} {_whose(line.client, own)} ({line.num_tokens} tokens)" for line in ahead.lines]
    others = [f"those of {_number(ahead.num_other_keys, 'other key')}"] if ahead.num_other_keys else []
    return f"{said}{of} {', '.join([*lines, *others])}"


def _whose(client: str, own: str) -> str:
    if not client:
        return "without a key"
    return "of its own key" if client == own else f"of {client}"


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _facts(request: KeptRequest) -> str:
    tokens = "" if request.prompt_tokens is None else f"{request.prompt_tokens} prompt tokens"
    if request.cached_tokens:
        tokens += f", {request.cached_tokens} of them cached on decode"
    named = {
        "model": f"{request.model} (an alias of {request.alias_of})" if request.alias_of else request.model,
        "key": request.client,
        "from": request.client_address,
        "revision": request.revision,
        "transfer": request.transfer_id,
        "trace": request.trace_id,
    }
    stream = "stream" if request.is_stream else ""
    words = (f"{name} {value}" for name, value in named.items() if value)
    return ", ".join(filter(None, [f"{request.method} {request.path}".strip(), stream, tokens, *words]))


def _timeline(request: KeptRequest) -> list[str]:
    """A row for each step, with the time until the next step; no rows for a request without known times.

    Times are rounded before they are subtracted, so that the shown times add up.
    """
    steps = timeline_of(request)
    if not steps:
        return []
    times = [round(step.at_s, 3) + 0.0 for step in steps]  # -0.0 is 0.0 then.
    tooks = [f"{after - at:8.3f} s" for at, after in pairwise(times)]
    lines = [f"{at:9.3f} s {took:>10}  {step.text}" for at, took, step in zip(times, [*tooks, ""], steps, strict=True)]
    return [f"{'at':>11} {'took':>10}", *lines]
