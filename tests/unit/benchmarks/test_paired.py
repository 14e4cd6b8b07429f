"""What two checkouts print becomes figures, and their ratios are of the same turn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks.paired import Figures, PairError, Part, compare, read_hook, read_router, read_starts, run

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
"""


def test_each_programs_table_is_read() -> None:
    """The direct way has its rate, the router what it adds; the hook its medians and its reference."""
    found: list[Figures] = [read_router(ROUTER), read_hook(HOOK), read_starts(STARTS)]
    assert found == [
        {
            "straight, 1 connections: requests/s": 10000,
            "straight, 1 connections: p50 us": 90,
            "pair, 64 connections: requests/s": 3000,
            "pair, 64 connections: added p50 us": 15000,
            "pair, 64 connections: router CPU us/request": 310,
        },
        {
            "8 requests: us a step": 646.7,
            "8 requests: us a layer": 21.8,
            "8 requests: without connector, us a layer": 450.4,
        },
        {"router: seconds": 0.92, "router: CPU s": 0.79, "router: MiB": 60.1},
    ]


def test_ratios_are_of_the_same_turn_and_a_figure_that_one_lacks_is_left_out() -> None:
    older = [{"a": 1.0, "gone": 1.0}, {"a": 4.0, "gone": 1.0}, {"a": 2.0, "gone": 1.0}]
    newer = [{"a": 2.0, "new": 1.0}, {"a": 4.0, "new": 1.0}, {"a": 0.5, "new": 1.0}]
    assert list(compare("p", older, newer)) == [("p", "a", "2", "2", "1.00 (0.25..2.00)")]


@pytest.mark.parametrize("ends", ["raise SystemExit('its last words')", "print('its last words', file=sys.stderr)"])
def test_each_checkout_runs_its_own_sources_and_one_that_fails_or_prints_no_figure_is_an_error(
    tmp_path: Path, ends: str
) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "mine.py").write_text(f"print({STARTS!r})")
    assert run(Part(("-P", "-c", "import mine"), read_starts, 1), tmp_path)["router: seconds"] == 0.92
    with pytest.raises(PairError, match="its last words"):
        run(Part(("-c", f"import sys; {ends}"), read_starts, 1), tmp_path)
