"""The end of a log, also of one that is longer than memory."""

from __future__ import annotations

from pathlib import Path

from pdcluster_cli.processes.last_words import describe_end, last_lines


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


def failed(at: str, why: str) -> str:
    prefix = f"(EngineCore pid=71) ERROR 11-22 {at} [core.py:1201] "
    return "".join(
        f"{prefix}{line}\n" for line in ("Traceback (most recent call last):", "  File x", f"ValueError: {why}")
    )


def test_of_a_process_that_has_served_an_error_of_hours_ago_is_no_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    served = "(APIServer pid=70) INFO 11-22 15:00:00 [launcher.py:1] POST /v1/completions\n"
    log.write_text(failed("12:00:00", "hours ago") + served + failed("16:00:00", "now") + failed("16:00:59", "an echo"))
    assert "prefill has ended with status 1: ValueError: hours ago; " in describe_end("prefill", 1, log)
    assert "prefill has ended with status 1: ValueError: now; " in describe_end("prefill", 1, log, has_served=True)
    log.write_text(failed("12:00:00", "hours ago") + served)
    assert "prefill has ended with status 1; " in describe_end("prefill", 1, log, has_served=True)
