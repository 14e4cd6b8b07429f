"""A file of lines: nothing that is wrong with it holds up its writer, and a file that was moved away is made anew."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from patience import PATIENCE_S
from pdcluster_protocol.errors import ConfigError
from pdcluster_router.telemetry import line_file
from pdcluster_router.telemetry.line_file import MAX_LINES, STDOUT, LineFile


@pytest.fixture(autouse=True)
def close_is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lines are in the file when it is closed, also where this process stands still meanwhile."""
    monkeypatch.setattr(line_file, "_CLOSE_S", PATIENCE_S)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_lines_are_written_in_their_order_alone_or_many_at_once(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines", "--x")
    for number in range(0, 100, 2):
        file.write(b"%d\n%d\n" % (number, number + 1), 2)
    file.close()
    assert (tmp_path / "lines").read_text().split() == [str(number) for number in range(100)]


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path, "--x")
    file.write(b"before\n")
    wait_until(lambda: path.read_text() == "before\n")
    path.rename(tmp_path / "lines.1")
    file.write(b"after\n")
    file.close()
    assert (path.read_text(), (tmp_path / "lines.1").read_text()) == ("after\n", "before\n")


def test_where_it_cannot_be_opened_anew_the_old_one_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    lost: list[int] = []
    file = LineFile(folder / "lines", "--x", lost.append)
    folder.rename(tmp_path / "away")
    file.write(b"a\n")
    file.close()
    assert (tmp_path / "away" / "lines").read_text() == "a\n"
    assert lost == []


def test_what_another_process_has_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("theirs\n")
    file = LineFile(path, "--x")
    file.write(b"ours\n")
    file.close()
    assert path.read_text() == "theirs\nours\n"


def test_a_pipe_that_is_read_by_none_is_refused_at_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"--x .*: name a file that can be written"):
        LineFile(tmp_path / "pipe", "--x")


def test_a_reader_that_stands_still_costs_lines_and_no_time_of_the_writer(tmp_path: Path) -> None:
    lost: list[int] = []
    reader, _ = _pipe_at(tmp_path / "pipe")
    file = LineFile(tmp_path / "pipe", "--x", lost.append)
    line = b"x" * 999 + b"\n"
    for _ in range(3 * MAX_LINES):
        file.write(line)
    assert sum(lost) >= MAX_LINES - 100
    drained: list[bytes] = []
    thread = threading.Thread(target=_drain, args=(reader, drained))
    thread.start()
    file.close()
    thread.join(PATIENCE_S)
    text = b"".join(drained)
    assert len(text) % len(line) == 0
    assert len(text) // len(line) + sum(lost) == 3 * MAX_LINES


def test_a_reader_that_has_gone_costs_lines(tmp_path: Path) -> None:
    lost: list[int] = []
    reader, _ = _pipe_at(tmp_path / "pipe")
    file = LineFile(tmp_path / "pipe", "--x", lost.append)
    os.close(reader)
    file.write(b"a\n")
    file.close()
    assert lost == [1]


def test_stdout_is_written_and_stays_open(capfd: pytest.CaptureFixture[str]) -> None:
    file = LineFile(STDOUT, "--x")
    file.write(b"a line\n")
    file.close()
    print("after it", flush=True)
    assert capfd.readouterr().out == "a line\nafter it\n"


def _pipe_at(path: Path) -> tuple[int, Path]:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    return reader, path


def _drain(reader: int, into: list[bytes]) -> None:
    while part := os.read(reader, 1 << 16):
        into.append(part)
    os.close(reader)
