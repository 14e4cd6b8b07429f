"""The trace file: whole lines, in order; a disk that is full is nobody's end."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE_S
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.telemetry import line_file
from pdcluster_router.telemetry.trace import TraceFile

TESTS = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def close_is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lines are in the file when it is closed, also where this process stands still meanwhile."""
    monkeypatch.setattr(line_file, "_CLOSE_S", PATIENCE_S)


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


_TORN = """
import os, resource, sys, time
from pathlib import Path
from unit.router.telemetry.test_trace import line
from pdcluster_router.telemetry.trace import TraceFile

path, lost = Path(sys.argv[1]), []
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
trace = TraceFile(path, lost.append)
trace.write(line("first" * 20))
while not lost:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
trace.write(line("second"))
trace.close()
"""
"""In a process of its own, for the limit is the process's. Python ignores the signal that comes with it."""


def test_after_a_line_that_the_disk_took_a_part_of_the_next_one_is_whole(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _TORN, tmp_path / "trace"], cwd=TESTS, check=True, timeout=PATIENCE_S)
    torn, whole = (tmp_path / "trace").read_text().splitlines()
    assert len(torn) == 100
    assert json.loads(whole)["request_id"] == "second"


def test_without_a_path_nothing_happens() -> None:
    trace = TraceFile(None)
    trace.write(line("a"))
    trace.close()
