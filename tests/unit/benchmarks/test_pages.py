"""What a benchmark's page says of its own making."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import write_page


def test_a_page_names_the_command_with_the_flags_that_were_used(tmp_path: Path) -> None:
    write_page("soak", "Soak", "body", tmp_path)
    assert " by `python -m benchmarks.soak --write`.\nbody\n" in (tmp_path / "soak.md").read_text()
    write_page("soak", "Soak", "body", tmp_path, flags="--requests 5 --seed 1")
    assert "`python -m benchmarks.soak --requests 5 --seed 1 --write`" in (tmp_path / "soak.md").read_text()


def test_a_page_has_its_programs_name_with_hyphens(tmp_path: Path) -> None:
    assert write_page("step_time", "Step times", "body", tmp_path).name == "step-time.md"
    assert "`python -m benchmarks.step_time --write`" in (tmp_path / "step-time.md").read_text()
