"""Files that need the same costly thing go to the same workers, and no file waits while a worker is idle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from scheduling import Kind, kind_of, next_file

TESTS: Final = Path(__file__).resolve().parents[1]
FILES: Final = sorted(TESTS.glob("**/test_*.py"))
WAITING: Final = {
    "plain_1": Kind.PLAIN,
    "engines_1": Kind.ENGINES,
    "engines_2": Kind.ENGINES,
    "plane_1": Kind.CONTROL_PLANE,
    "plain_2": Kind.PLAIN,
}


ENGINES_FIRST: Final = ["engines_1", "engines_2", "plain_1", "plain_2", "plane_1"]


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        (0, ENGINES_FIRST),
        (1, ["plane_1", "plain_1", "plain_2", "engines_1", "engines_2"]),
        (2, ENGINES_FIRST),
        (3, ["plain_1", "plain_2", "engines_1", "engines_2", "plane_1"]),
        (4, ENGINES_FIRST),
    ],
)
def test_a_worker_takes_its_own_kind_first_and_all_in_the_end(worker: int, expected: list[str]) -> None:
    """When it is alone. A fifth worker is as the first."""
    left, taken = dict(WAITING), []
    while left:
        taken.append(next_file(left, worker))
        del left[taken[-1]]
    assert taken == expected


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("pytestmark = pytest.mark.engines", Kind.ENGINES),
        ("pytestmark = [pytest.mark.control_plane, pytest.mark.slow]", Kind.CONTROL_PLANE),
        ("def test_it(control_plane: ControlPlane) -> None: ...", Kind.CONTROL_PLANE),
        ("from control_plane.binaries import find_binaries", Kind.PLAIN),
    ],
)
def test_a_files_kind_is_read_from_its_text(source: str, kind: Kind) -> None:
    assert kind_of(source) is kind


def test_every_file_that_takes_the_shared_engines_or_control_plane_is_of_that_kind() -> None:
    """By the names of the fixtures, for a mark may be forgotten."""
    for fixture, kind in {"harness": Kind.ENGINES, "control_plane": Kind.CONTROL_PLANE}.items():
        takes = re.compile(rf"^ *def \w+\([^)]*\b{fixture}: ", re.MULTILINE)
        takers = [file for file in FILES if takes.search(file.read_text())]
        assert takers, fixture
        assert {file.name for file in takers if kind_of(file.read_text()) is not kind} == set()
