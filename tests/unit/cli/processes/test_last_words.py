"""The end of a log, also of one that is longer than memory."""

from __future__ import annotations

from pathlib import Path

from pdcluster_cli.processes.last_words import last_lines


def test_the_last_lines_of_a_log_are_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\nsecond\nthird\n")
    assert last_lines(log, 2) == "    second\n    third"
    assert last_lines(tmp_path / "none").startswith("    (no log: ")


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # A hole: nobody has memory for it.
        file.seek(0, 2)
        file.write(b"\nthe end\n")
    assert last_lines(log, 1) == "    the end"
