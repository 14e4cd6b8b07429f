"""``docs/reports/hardware-review.md`` names tests that exist, and no row that was held is without one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from unit.test_support_page import names_in
from zoo.cases import CASES

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs" / "reports" / "hardware-review.md").read_text()
PROOFS: Final = sorted(set(re.findall(r"`(tests/[^`]+::[^`]+)`", PAGE)))
ROWS: Final = [line for line in PAGE.splitlines() if re.match(r"\| \d+(, \d+)*( [A-Z])? \|", line)]
HELD: Final = {2, 9, 16, 19, 24, 29, 53, 54, 65, 68, 75, 80, 23, 26, 27, 64, 67, 17, 70, 38, 50}
"""Of the review, by its numbers: D, M, R and X."""


@pytest.mark.parametrize("proof", PROOFS)
def test_every_proof_that_the_page_names_exists(proof: str) -> None:
    file, _, name = proof.partition("::")
    test, _, case = name.partition("[")
    assert test in names_in(file) or f"def {test}(" in (Path(__file__).resolve().parents[2] / file).read_text()
    assert not case or case[:-1] in CASES


def test_every_row_that_was_held_and_every_point_on_ascend_has_a_proof() -> None:
    assert all("`tests/" in row for row in ROWS)
    heads = [row.split("|")[1].strip() for row in ROWS]
    assert {int(head.split()[0]) for head in heads if head[-1].isalpha()} >= HELD
    points = {int(number) for head in heads if not head[-1].isalpha() for number in head.split(", ")}
    assert points == set(range(1, 20))
