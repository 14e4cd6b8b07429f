"""The pages about reviews name tests that exist, and leave out no row that a review held or found."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

import pytest
from benchmarks.router_attacks import ATTACKS

from integration import wire_rows
from unit.test_support_page import names_in
from zoo.cases import CASES

ROOT: Final = Path(__file__).resolve().parents[2]
HARDWARE, ROUTER = ((ROOT / "docs" / "reports" / f"{name}-review.md").read_text() for name in ("hardware", "router"))
PROOFS: Final = sorted(set(re.findall(r"`(tests/[^`]+::[^`]+)`", HARDWARE + ROUTER)))
CASES_OF: Final[dict[str, Collection[str]]] = {
    "test_a_pool_answers_like_a_single_engine": CASES,
    "test_what_a_review_has_sent": wire_rows.ROWS,
    "test_what_a_review_has_answered_as_an_engine": wire_rows.ENGINE_ROWS,
    "test_one_clients_attack_breaks_no_stream_of_others_and_takes_little_memory": ATTACKS,
}
"""The cases of tests of which the pages name one."""

HELD: Final = {2, 9, 16, 19, 24, 29, 53, 54, 65, 68, 75, 80, 23, 26, 27, 64, 67, 17, 70, 38, 50}
"""Of the review of hardware, by its numbers: D, M, R and X."""
FOUND: Final = [f"{'H' if number < 7 else 'M'}{number}" for number in range(1, 15)] + [f"L{n}" for n in range(1, 12)]
"""By the review of the router: high, medium and low."""


@pytest.mark.parametrize("proof", PROOFS)
def test_every_proof_that_a_page_names_exists(proof: str) -> None:
    file, _, name = proof.partition("::")
    test, _, case = name.partition("[")
    assert test in names_in(file) or f"def {test}(" in (ROOT / file).read_text()
    assert not case or case[:-1] in CASES_OF[test]


def test_every_row_that_was_held_and_every_point_on_ascend_has_a_proof() -> None:
    rows = rows_of(HARDWARE, r"\d+(, \d+)*( [A-Z])?")
    assert all("`tests/" in row for row in rows.values())
    assert {int(head.split()[0]) for head in rows if head[-1].isalpha()} >= HELD
    points = {int(number) for head in rows if not head[-1].isalpha() for number in head.split(", ")}
    assert points == set(range(1, 20))


def test_every_finding_in_the_router_has_a_proof_or_is_refused_or_open() -> None:
    rows = rows_of(ROUTER, r"[HML]\d+")
    assert list(rows) == FOUND
    assert all(re.search(r"`tests/[^`]+::|\b(refused|open)\b", row, re.IGNORECASE) for row in rows.values())


def rows_of(page: str, head: str) -> dict[str, str]:
    """The rows of its tables that begin with such a head, by that."""
    return {found[1]: found[0] for found in re.finditer(rf"^\| ({head}) \|.*$", page, re.MULTILINE)}
