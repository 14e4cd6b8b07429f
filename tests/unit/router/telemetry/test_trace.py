"""The trace file: whole lines, in order; a disk that is full is nobody's end."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.telemetry.trace import TraceFile


def line(name: str) -> RequestTrace:
    return RequestTrace(transfer_id=TransferId("t"), request_id=name, received_at=1.0)


def test_every_line_is_there_in_order_when_it_is_closed(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace")
    for number in range(500):
        trace.write(line(str(number)))
    trace.close()
    lines = (tmp_path / "trace").read_text().splitlines()
    assert [json.loads(written)["request_id"] for written in lines] == [str(number) for number in range(500)]


def test_a_full_disk_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    lost: list[int] = []
    trace = TraceFile(Path("/dev/full"), lost.append)
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            trace.write(line(str(number)))
        trace.close()
    assert sum(lost) == 50
    (record,) = caplog.records
    assert "No space left" in record.getMessage()


def test_without_a_path_nothing_happens() -> None:
    trace = TraceFile(None)
    trace.write(line("a"))
    trace.close()
