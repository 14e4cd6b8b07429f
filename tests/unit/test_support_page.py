"""``docs/support.md`` says what the tests prove: no more and no less."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from zoo.cases import CASES
from zoo.support import POOL, render, rows

ROOT: Final = Path(__file__).resolve().parents[2]
PROOFS: Final = sorted({proof for row in rows() for proof in row.proofs})


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_page_is_fresh() -> None:
    assert (ROOT / "docs" / "support.md").read_text() == render(), "run: python -m tests.zoo"


@pytest.mark.parametrize("proof", PROOFS)
def test_every_proof_that_the_page_names_exists(proof: str) -> None:
    file, _, name = proof.partition("::")
    assert name.partition("[")[0] in names_in(file)


def test_the_page_names_every_pool_of_the_matrix_and_no_other() -> None:
    named = {proof.removeprefix(POOL)[1:-1] for proof in PROOFS if proof.startswith(POOL)}
    assert named == set(CASES)


def test_every_test_of_the_support_matrix_is_a_proof() -> None:
    files = sorted(path.relative_to(ROOT) for path in ROOT.glob("tests/integration/test_support_*.py"))
    tests = {f"{file}::{name}" for file in files for name in names_in(str(file)) if name.startswith("test_")}
    assert tests
    assert tests <= {proof.partition("[")[0] for proof in PROOFS}
