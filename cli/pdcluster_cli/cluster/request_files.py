"""Finds requests in an access log. A log may go back further than a router remembers, but tells less of each attempt.

Lines of other kinds are skipped, because on stdout the log is mixed with them. A log may be large, so only lines that
contain the id are parsed. If many requests have the same id, only the newest ``MAX_FOUND`` are kept, as by a router.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec

from pdcluster_protocol.access import AccessLine
from pdcluster_protocol.errors import NO_JSON
from pdcluster_protocol.kept import MAX_FOUND, KeptAnswer, KeptRequest, Milestone, Moment, names_for
from pdcluster_router.core.telemetry.why import explained

if TYPE_CHECKING:
    from io import BufferedReader

_SIGN: Final = b'{"event":"access"'
_GZIP: Final = b"\x1f\x8b"


def read_access_log(path: str, name: str) -> tuple[KeptAnswer, str]:
    """The newest requests with this id in the file (``-``: standard input), and why it cannot be read to its end, as a
    log that is still being compressed; empty: it was read."""
    problems: list[Exception] = []
    found: list[KeptRequest] = []
    try:
        with _opened(path) as lines:
            found = find(_readable(lines, problems), name)
    except OSError as error:
        problems.append(error)
    return KeptAnswer(requests=tuple(found)), "".join(map(_said, problems[:1]))


def find(lines: Iterable[bytes], name: str) -> list[KeptRequest]:
    """The newest requests with this request id or transfer id, the newest first."""
    names = names_for(name)
    parts = [msgspec.json.encode(one) for one in names]
    newest = deque(
        (line for text in lines if (line := _parse(text, parts)) and _is_named(line, names)), maxlen=MAX_FOUND
    )
    return [explained(_request_of(line)) for line in reversed(newest)]


@contextmanager
def _opened(path: str) -> Iterator[Iterable[bytes]]:
    """The file's lines, unpacked if ``logrotate`` has compressed it."""
    with nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
        is_packed = cast("BufferedReader", file).peek(len(_GZIP)).startswith(_GZIP)
        if not is_packed:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield unpacked


def _readable(lines: Iterable[bytes], problems: list[Exception]) -> Iterator[bytes]:
    """The lines, until one cannot be read: why goes to ``problems``."""
    try:
        yield from lines
    except (OSError, EOFError, zlib.error) as error:
        problems.append(error)


def _said(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _parse(text: bytes, parts: Sequence[bytes]) -> AccessLine | None:
    """The access line in ``text``, perhaps after a time that a container's runtime wrote; None: no line with the id."""
    begin = text.find(_SIGN)
    if begin < 0 or not any(part in text for part in parts):
        return None
    try:
        return _decode(text[begin:])
    except NO_JSON:
        return None


def _is_named(line: AccessLine, names: Sequence[str]) -> bool:
    has_end = line.ts is not None and line.ts.tzinfo is not None
    return has_end and not {line.request_id, line.transfer_id}.isdisjoint(names)


def _request_of(line: AccessLine) -> KeptRequest:
    return KeptRequest(
        request_id=line.request_id,
        transfer_id=line.transfer_id,
        trace_id=line.trace_id,
        client=line.client,
        client_address=line.client_address,
        model=line.model,
        alias_of=line.alias_of,
        method=line.method,
        path=line.path,
        is_stream=line.is_stream,
        ended_at_unix_s=line.ts.timestamp() if line.ts is not None else None,
        total_s=line.total_s,
        read_s=line.read_s,
        queue_s=line.queue_s,
        status=line.status,
        outcome=line.outcome or "",
        revision=line.revision,
        is_local_prefill=line.is_local_prefill,
        prompt_tokens=line.prompt_tokens,
        cached_tokens=line.cached_tokens,
        moments=tuple(_moments_of(line)),
    )


def _moments_of(line: AccessLine) -> Iterable[Moment]:
    """The moments that the line holds. The line does not say when failures happened, so they stand at the end.

    The first byte may be the router's own: of an error, or of a comment in a stream. So its moment names no engine.
    """
    if line.reservation_s is not None:
        yield Moment(line.reservation_s, Milestone.RESERVED.value, line.decode_engine)
    if line.first_byte_s is not None:
        yield Moment(line.first_byte_s, Milestone.FIRST_BYTE.value)
    for kind in line.failures:
        yield Moment(line.total_s or 0.0, kind, _engine_of(kind, line))


def _engine_of(kind: str, line: AccessLine) -> str:
    """The engine of a failure, if the line shows it: if the role that failed had only one attempt. Else empty."""
    if kind.startswith("prefill_") and kind != "prefill_exhausted":
        return line.prefill_engine if line.prefill_attempts == 1 else ""
    return line.decode_engine if kind.startswith("decode_") and line.decode_attempts == 1 else ""


_decode: Final = msgspec.json.Decoder(AccessLine).decode
