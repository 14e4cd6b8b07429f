"""The command line reads what router and connector write into trace files."""

from __future__ import annotations

from pathlib import Path

from pdcluster_cli.local.report import read_traces
from pdcluster_connector.trace import Trace
from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.telemetry.trace import TraceFile
from unit.protocol.test_trace import WORDS

LINES = [line for line, _ in WORDS]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    of_router, of_engines = TraceFile(tmp_path / "router"), Trace(str(tmp_path / "engine"))
    for line in LINES:
        if isinstance(line, RequestTrace):
            of_router.write(line)
        else:
            of_engines.write(line)
    of_router.close()
    assert read_traces([tmp_path / "router", tmp_path / "engine"]) == LINES


def test_what_is_told_needs_no_file() -> None:
    told: list[object] = []
    trace = Trace("", told.append)
    of_engines = [line for line in LINES if not isinstance(line, RequestTrace)]
    for line in of_engines:
        trace.write(line)
    assert told == of_engines
