"""Writes a kept request as text for a person: where it was when, how it ended, why, and what to do.

R-7 failed: 502 prefill_failed after 3.214 s, 2026-11-26 08:41:12 UTC (asked: router-1)
POST /v1/completions, model m, stream, key team-a, transfer 5d41402abc4b2a76b9719d911017c592

       at       took
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

from pdcluster_protocol.kept import KeptRequest, Milestone, Moment
from pdcluster_router.core.telemetry.scrub import printable

OK: Final = "ok"
"""Outcome of a request that was served whole."""
_HAPPENED: Final = {
    Milestone.DECODE_SENT.value: "sent to {engine}",
    Milestone.RESERVED.value: "{engine} has reserved blocks for its KV",
    Milestone.PREFILLS_LOCALLY.value: "{engine} computes the rest of the prompt itself",
    Milestone.PREFILL_SENT.value: "attempt {attempt}: sent to {engine}",
    Milestone.PREFILL_REPLIED.value: "attempt {attempt}: {engine} has done its part",
    Milestone.FIRST_BYTE.value: "first byte from {engine}",
}


def describe(request: KeptRequest, engines: Mapping[str, str], source: str) -> str:
    """The whole text. ``engines``: pod or URL by name; ``source``: the router or file that told of the request."""
    parts = [f"{_headline(request)} (told by {source})", _facts(request), "", *_timeline(request)]
    known = {moment.engine for moment in request.moments} & engines.keys()
    if known:
        parts += ["", ", ".join(f"{name} is {engines[name]}" for name in sorted(known))]
    if request.cause:
        parts += ["", f"cause: {request.cause}", f"cure:  {request.cure}"]
    return "\n".join(map(printable, parts))


def duration(seconds: float) -> str:
    """The time in the largest unit that it has at least two of. Below 0, as our clock may be behind a router's: 0 s."""
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


def _facts(request: KeptRequest) -> str:
    tokens = "" if request.prompt_tokens is None else f"{request.prompt_tokens} prompt tokens"
    if request.cached_tokens:
        tokens += f", {request.cached_tokens} of them cached on decode"
    named = {
        "model": request.model,
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
    """A row for each moment, with the time until the next one; none for a request that was refused as it came.

    Times are rounded before they are subtracted, so that the shown times add up.
    """
    if request.total_s is None:
        return []
    begin = [] if request.queue_s is None else [(0.0, "waits to be admitted")]
    rows = [*begin, *((moment.at_s, _happened(moment)) for moment in request.moments)]
    rows.append((request.total_s, "now" if request.ended_at_unix_s is None else "ended"))
    rows.sort(key=lambda row: row[0])
    tooks = [f"{round(after[0], 3) - round(row[0], 3):8.3f} s" for row, after in pairwise(rows)]
    lines = [f"{at:9.3f} s {took:>10}  {what}" for (at, what), took in zip(rows, [*tooks, ""], strict=True)]
    return [f"{'at':>11} {'took':>10}", *lines]


def _happened(moment: Moment) -> str:
    if moment.what == Milestone.FIRST_BYTE.value and not moment.engine:
        return "first byte to the client"  # From an access log, which does not name the engine.
    form = _HAPPENED.get(moment.what)
    if form is not None:
        return form.format(engine=moment.engine, attempt=moment.attempt)
    attempt = f"attempt {moment.attempt}: " if moment.attempt else ""
    engine = f" {moment.engine}" if moment.engine else ""
    return f"{attempt}{moment.what}{engine}{': ' if moment.reason else ''}{moment.reason}"
