"""Requests out of an access log, which goes back as far as the file does, and says less of each attempt.

Lines that are no such line are passed over: on stdout they stand among others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from pdcluster_protocol.kept import KeptAnswer, KeptRequest, Milestone, Moment

_SIGN: Final = '"event":"access"'


class _LogEntry(msgspec.Struct, tag_field="event", tag="access"):
    """The fields of ``AccessLine`` that are told here."""

    ts: datetime
    request_id: str = ""
    transfer_id: str = ""
    trace_id: str = ""
    client: str = ""
    path: str = ""
    model: str = ""
    is_stream: bool | None = None
    status: int | None = None
    outcome: str | None = None
    failures: tuple[str, ...] = ()
    decode_engine: str = ""
    prefill_engine: str = ""
    revision: str = ""
    is_local_prefill: bool | None = None
    prefill_attempts: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    queue_s: float | None = None
    reservation_s: float | None = None
    first_byte_s: float | None = None
    total_s: float | None = None


def read_access_log(path: str, name: str) -> KeptAnswer | str:
    """The requests of this name in the file, ``-`` for standard input; or why it cannot be read."""
    try:
        if path == "-":
            return KeptAnswer(requests=tuple(find(sys.stdin, name)))
        with Path(path).open(encoding="utf-8", errors="replace") as lines:
            return KeptAnswer(requests=tuple(find(lines, name)))
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def find(lines: Iterable[str], name: str) -> list[KeptRequest]:
    """The requests with this request id or transfer id."""
    from pdcluster_router.core.why import explain

    found = [_request_of(line) for text in lines if _SIGN in text and (line := _parse(text)) and _is(line, name)]
    words = [explain(request) for request in found]
    return [
        msgspec.structs.replace(request, cause=told.cause, cure=told.cure)
        for request, told in zip(found, words, strict=True)
    ]


def _parse(text: str) -> _LogEntry | None:
    """A container's runtime may have put a time before it."""
    try:
        return _DECODE(text[text.index("{") :])
    except (msgspec.DecodeError, ValueError):
        return None


def _is(line: _LogEntry, name: str) -> bool:
    return name in (line.request_id, line.transfer_id)


def _request_of(line: _LogEntry) -> KeptRequest:
    return KeptRequest(
        request_id=line.request_id,
        transfer_id=line.transfer_id,
        trace_id=line.trace_id,
        client=line.client,
        model=line.model,
        path=line.path,
        is_stream=line.is_stream,
        ended_at_unix_s=line.ts.timestamp(),
        total_s=line.total_s,
        queue_s=line.queue_s,
        status=line.status,
        outcome=line.outcome or "",
        revision=line.revision,
        is_local_prefill=line.is_local_prefill,
        prompt_tokens=line.prompt_tokens,
        cached_tokens=line.cached_tokens,
        moments=tuple(_moments_of(line)),
    )


def _moments_of(line: _LogEntry) -> Iterable[Moment]:
    """Those whose time the line has. When failures happened it does not say: they stand at the end."""
    if line.reservation_s is not None:
        yield Moment(line.reservation_s, Milestone.RESERVED.value, line.decode_engine)
    if line.first_byte_s is not None:
        yield Moment(line.first_byte_s, Milestone.FIRST_BYTE.value, line.decode_engine)
    for kind in line.failures:
        yield Moment(line.total_s or 0.0, kind, _engine_of(kind, line))


def _engine_of(kind: str, line: _LogEntry) -> str:
    """The last one of the role that the kind is about; the line knows no other."""
    if kind.startswith("prefill_") and kind != "prefill_exhausted":
        return line.prefill_engine if line.prefill_attempts == 1 else ""
    return line.decode_engine if kind.startswith("decode_") else ""


_DECODE: Final = msgspec.json.Decoder(_LogEntry).decode
