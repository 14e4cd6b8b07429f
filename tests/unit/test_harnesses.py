"""What tests and benchmarks start engines with is what users start them with: no harness has words of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
OWN: Final = "cli/pdcluster_cli/processes/engines.py or parallelism.py"
"""Where options become an engine's words; ``EnginePlan`` is how everybody asks for them."""
WORDS: Final = (
    *("--distributed-executor-backend", "--enforce-eager"),
    *("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "-tp", "-pp", "-dp"),
    *("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_ENABLE_V1_MULTIPROCESSING"),
)
"""Executor, ranks, threads, and how processes are made: what decides whether an engine starts at all."""
NO_HARNESS: Final = (
    "tests/unit",  # looks at words, starts nothing
    "tests/operator_cases",  # engineArgs of a PDCluster, without dashes but for one that is refused
    "tests/integration/test_by_hand.py",  # the page's own commands
    "tests/integration/test_local.py",  # a user's command line
    "tests/integration/test_zygote.py",  # what its variables are for
)
FILES: Final = [
    path
    for path in sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py")])
    if not str(path.relative_to(ROOT)).startswith(NO_HARNESS)
]


def words_in(source: str) -> Iterator[str]:
    """Literals that are such a word, alone or with its value."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.partition("=")[0] in WORDS:
            yield node.value


def test_no_harness_has_words_of_its_own() -> None:
    found = {str(path.relative_to(ROOT)): [*words_in(path.read_text())] for path in FILES}
    assert {path: words for path, words in found.items() if words} == {}, f"they belong into {OWN}"


@pytest.mark.parametrize("line", ['a = ("-tp", "2")', 'env["OMP_NUM_THREADS"] = "1"', 'f("--data-parallel-size=2")'])
def test_the_search_is_not_blind(line: str) -> None:
    assert len([*words_in(line)]) == 1
    assert len(FILES) > 50
