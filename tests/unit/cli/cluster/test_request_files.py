"""Requests out of an access log, among other lines."""

from __future__ import annotations

import gzip
import random
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from pdcluster_cli.cluster import why
from pdcluster_cli.cluster.request_files import find, read_access_log
from pdcluster_protocol.access import AccessLine
from pdcluster_protocol.kept import MAX_FOUND, KeptAnswer

LINE = AccessLine(
    ts=datetime(2026, 11, 26, 8, 0, 0, tzinfo=UTC),
    request_id="R-7",
    transfer_id="5d41",
    client_address="203.0.113.7",
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


def text_of(line: AccessLine) -> bytes:
    return msgspec.json.encode(line)


def test_a_line_among_others_is_found_by_either_id() -> None:
    other = msgspec.structs.replace(LINE, request_id="R-77", transfer_id="x")
    lines = [
        b"router on http://...",
        text_of(other),
        b"2026-11-26T08:00:00Z stdout F " + text_of(LINE),
        b'{"event":"access","request_id":"R-7","transfer_id":"5d41","ts":"noon"}',
        b'{"event":"access","request_id":"R-7","transfer_id":"5d41"}',
        b'{"event":"access","request_id":"R-7","transfer_id":"5d41","ts":"0001-01-01T00:00:00"}',
        b'{"event":"access","request_id":"R-7","transfer_id":"5d41","model":"\xff"}',
        b"\x00\xff" + text_of(LINE)[:99],
    ]
    for name in ("R-7", "5d41"):
        (request,) = find(lines, name)
        assert (request.request_id, request.status, request.total_s) == ("R-7", 502, 3.0)
        assert request.client_address == "203.0.113.7"
    for name in ("R", "", "\udcff", "R\u00e9"):
        assert find(lines, name) == []


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


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "access"
    assert read_access_log(str(path), "R") == (KeptAnswer(), "No such file or directory")
    path.write_bytes(text_of(LINE) + b"\n")
    assert read_access_log(str(path), "R") == (KeptAnswer(), "")


def test_the_id_in_vllms_answer_finds_a_line_too() -> None:
    for name in ("cmpl-R-7", "chatcmpl-R-7"):
        assert [one.request_id for one in find([text_of(LINE)], name)] == ["R-7"]


def test_of_an_id_that_many_have_the_newest_are_told_the_newest_first() -> None:
    lines = (text_of(msgspec.structs.replace(LINE, total_s=float(number))) for number in range(5 * MAX_FOUND))
    totals = [request.total_s for request in find(lines, "R-7")]
    assert totals == [float(5 * MAX_FOUND - 1 - number) for number in range(MAX_FOUND)]


def test_a_file_that_was_compressed_is_read_and_one_that_is_cut_off_is_told(tmp_path: Path) -> None:
    path = tmp_path / "access.gz"
    path.write_bytes(whole := gzip.compress(text_of(LINE) + b"\n"))
    answer, problem = read_access_log(str(path), "R-7")
    assert ([request.request_id for request in answer.requests], problem) == (["R-7"], "")
    for broken in (whole[:-20], whole[:20], whole[:12] + b"x" * 99):
        path.write_bytes(broken)
        answer, told = read_access_log(str(path), "R-7")
        assert not answer.requests
        assert told
        assert "None" not in told


def test_of_a_compressed_file_that_is_cut_off_the_requests_before_that_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "access.gz"
    others = b"".join(
        b"%d %s\n" % (number, random.Random(number).randbytes(64).hex().encode()) for number in range(9999)
    )
    whole = gzip.compress(text_of(LINE) + b"\n" + others)
    path.write_bytes(whole[: len(whole) // 2])
    problem = "Compressed file ended before the end-of-stream marker was reached"
    assert why.main(["R-7", "--access-log", str(path)]) == 1
    told = capsys.readouterr()
    assert "R-7" in told.out
    rest = "could not read the rest of the file, which may hold newer requests"
    assert told.err == f"pdcluster why: {path}: {rest}: {problem}\n"
    assert why.main(["R-8", "--access-log", str(path)]) == 2
    assert f"pdcluster why: {path}: it cannot be read: {problem}\n" in capsys.readouterr().err


def test_the_first_byte_of_a_line_is_nobodys_and_an_engine_of_several_is_not_guessed() -> None:
    line = msgspec.structs.replace(LINE, first_byte_s=0.7, failures=("decode_lost",), decode_attempts=2)
    (request,) = find([text_of(line)], "R-7")
    assert [(one.what, one.engine) for one in request.moments[1:]] == [("first_byte", ""), ("decode_lost", "")]


def test_a_page_that_was_asked_for_keeps_its_method() -> None:
    line = msgspec.structs.replace(LINE, method="GET", path="/v1/models", failures=(), outcome="rejected", status=401)
    (request,) = find([text_of(line)], "R-7")
    assert (request.method, request.path) == ("GET", "/v1/models")
    assert request.cause == "the router refused it"
