"""Requests out of an access log, among other lines."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pdcluster_cli.request_files import _LogEntry, find, read_access_log
from pdcluster_protocol.kept import KeptAnswer
from pdcluster_router.telemetry.access_log import AccessLine

LINE = AccessLine(
    ts=datetime(2026, 11, 26, 8, 0, 0, tzinfo=UTC),
    request_id="R-7",
    transfer_id="5d41",
    path="/v1/completions",
    status=502,
    outcome="prefill_failed",
    failures=("prefill_failed", "prefill_exhausted"),
    decode_engine="decode-0",
    prefill_engine="prefill-1",
    decode_attempts=1,
    prefill_attempts=1,
    queue_s=0.5,
    reservation_s=0.6,
    total_s=3.0,
)


def text_of(line: AccessLine) -> str:
    return msgspec.json.encode(line).decode()


def test_a_line_among_others_is_found_by_either_id() -> None:
    other = msgspec.structs.replace(LINE, request_id="R-77", transfer_id="x")
    lines = [
        "router on http://...",
        text_of(other),
        f"2026-11-26T08:00:00Z stdout F {text_of(LINE)}",
        '{"event":"access"',
    ]
    for name in ("R-7", "5d41"):
        (request,) = find(lines, name)
        assert (request.request_id, request.status, request.total_s) == ("R-7", 502, 3.0)
    assert find(lines, "R") == []


def test_its_cause_is_that_of_its_failures() -> None:
    (request,) = find([text_of(LINE)], "R-7")
    assert [(one.what, one.engine) for one in request.moments] == [
        ("reserved", "decode-0"),
        ("prefill_failed", "prefill-1"),
        ("prefill_exhausted", ""),
    ]
    assert request.cause.startswith("the prefill engine refused")
    assert request.cause.endswith("(prefill-1)")
    assert request.cure


def test_its_fields_are_those_of_the_access_log() -> None:
    assert set(_LogEntry.__struct_fields__) <= set(AccessLine.__struct_fields__)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "access"
    assert read_access_log(str(path), "R") == "it cannot be read: No such file or directory"
    path.write_text(text_of(LINE) + "\n")
    assert read_access_log(str(path), "R") == KeptAnswer()
