"""What two checkouts print becomes figures, and their ratios are of the same turn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks.paired import PARTS, PairError, Part, compare, read_hook, read_router, read_starts, run

ROUTER = """\
connections       way requests/s   p50 us   p99 us   rate  added p50 us  router CPU us/request
          1  straight      10000       90      200   1.00             0                      0
         64      pair       3000    20000    40000   0.20         15000                    310
"""
HOOK = """\
32 layers, 128 blocks per request, 4 steps; microseconds
requests | per step  | per layer: median, p99 | Python per block | ratio
       8 |     646.7 |     21.8   5309.6 |    450.4 |  0.048
"""
STARTS = """\
     part  seconds   CPU s    MiB
   router     0.92    0.79   60.1
 operator     2.02    1.74   73.6
"""


def test_the_direct_way_has_its_rate_and_the_router_what_it_adds() -> None:
    assert read_router(ROUTER) == {
        "straight, 1 connections: requests/s": 10000,
        "straight, 1 connections: p50 us": 90,
        "pair, 64 connections: requests/s": 3000,
        "pair, 64 connections: added p50 us": 15000,
        "pair, 64 connections: router CPU us/request": 310,
    }


def test_the_hook_has_its_medians_and_its_reference() -> None:
    assert read_hook(HOOK) == {
        "8 requests: us a step": 646.7,
        "8 requests: us a layer": 21.8,
        "8 requests: without connector, us a layer": 450.4,
    }


def test_starts_have_seconds_processor_time_and_memory() -> None:
    figures = read_starts(STARTS)
    assert len(figures) == 6
    assert figures["operator: seconds"] == 2.02
    assert figures["router: MiB"] == 60.1


def test_ratios_are_of_the_same_turn_and_a_figure_that_one_lacks_is_left_out() -> None:
    older = [{"a": 1.0, "gone": 1.0}, {"a": 4.0, "gone": 1.0}, {"a": 2.0, "gone": 1.0}]
    newer = [{"a": 2.0, "new": 1.0}, {"a": 4.0, "new": 1.0}, {"a": 1.0, "new": 1.0}]
    assert list(compare("p", older, newer)) == [("p", "a", "2", "2", "1.00 (0.50..2.00)")]


def checkout(folder: Path) -> Path:
    """One whose Python is ours."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/python").symlink_to(sys.executable)
    return folder


def test_each_checkout_runs_its_own_sources(tmp_path: Path) -> None:
    own = checkout(tmp_path)
    (own / "mine.py").write_text(f"print({STARTS!r})")
    assert run(Part(("-P", "-c", "import mine"), read_starts, 1), own)["router: seconds"] == 0.92


@pytest.mark.parametrize(
    "ends", ["raise SystemExit('its last words')", "import sys; print('its last words', file=sys.stderr)"]
)
def test_a_program_that_fails_or_prints_no_figure_is_an_error_with_its_last_words(tmp_path: Path, ends: str) -> None:
    with pytest.raises(PairError, match="its last words"):
        run(Part(("-c", ends), read_starts, 1), checkout(tmp_path))


def test_what_the_parts_run_is_there() -> None:
    root = Path(__file__).resolve().parents[3]
    assert (root / PARTS["router"].words[0]).is_file()
    assert Path(PARTS["starts"].words[-1]).is_file()
