"""Files that need the same costly thing go to the same workers, and no file waits while a worker is idle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from scheduling import FIRST_KINDS, Kind, kind_of, next_file

TESTS: Final = Path(__file__).resolve().parents[1]
FILES: Final = sorted(TESTS.glob("**/test_*.py"))
WAITING: Final = {
    "plain_1": Kind.PLAIN,
    "engines_1": Kind.ENGINES,
    "engines_2": Kind.ENGINES,
    "plane_1": Kind.CONTROL_PLANE,
    "plain_2": Kind.PLAIN,
}


def order(worker: int) -> list[str]:
    """In which a worker takes all files, when it is alone."""
    left, taken = dict(WAITING), []
    while left:
        taken.append(next_file(left, worker))
        del left[taken[-1]]
    return taken


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        pytest.param(0, ["engines_1", "engines_2", "plain_1", "plain_2", "plane_1"], id="engines"),
        pytest.param(1, ["plane_1", "plain_1", "plain_2", "engines_1", "engines_2"], id="control plane"),
        pytest.param(3, ["plain_1", "plain_2", "engines_1", "engines_2", "plane_1"], id="plain"),
    ],
)
def test_a_worker_takes_its_own_kind_first_and_all_in_the_end(worker: int, expected: list[str]) -> None:
    assert order(worker) == expected


def test_a_fifth_worker_is_as_the_first() -> None:
    assert order(4) == order(0)


def test_four_workers_have_two_for_engines_and_one_for_the_control_plane() -> None:
    assert sorted(FIRST_KINDS, key=lambda kind: kind.name) == [
        Kind.CONTROL_PLANE, Kind.ENGINES, Kind.ENGINES, Kind.PLAIN,
    ]  # fmt: skip


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
