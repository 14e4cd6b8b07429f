"""How many examples are drawn: few before a commit, all before a release."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawn import ALL_VARIABLE, FEW_VARIABLE, share


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param((), 3, id="make test-costly, and one test by hand"),
        pytest.param((FEW_VARIABLE,), 9, id="make check and make test"),
        pytest.param((ALL_VARIABLE,), 1, id="make test-all"),
        pytest.param((FEW_VARIABLE, ALL_VARIABLE), 1, id="make both"),
    ],
)
def test_each_target_draws_its_share(variables: tuple[str, ...], expected: int) -> None:
    assert share(variables) == expected


def test_the_makefile_sets_the_variables_that_are_read() -> None:
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    assert makefile.count(f"{FEW_VARIABLE}=1 ") == 2
    assert makefile.count(f"{ALL_VARIABLE}=1 ") == 1
