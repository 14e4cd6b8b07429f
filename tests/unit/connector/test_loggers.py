"""vLLM configures the logger ``vllm`` alone: lines of any other logger of the connector would be lost."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

CONNECTOR: Final = Path(__file__).resolve().parents[3] / "connector" / "pdcluster_connector"
ABOVE: Final = "'vllm.pdcluster."


def loggers_in(source: str) -> list[str]:
    """The argument of each ``getLogger``, as it is written with single quotes; empty: it has none."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return ["".join(map(ast.unparse, call.args)) for call in calls if ast.unparse(call.func).endswith("getLogger")]


def test_each_logger_of_the_connector_is_below_vllms() -> None:
    found = {str(file.relative_to(CONNECTOR)): loggers_in(file.read_text()) for file in CONNECTOR.rglob("*.py")}
    assert sum(map(len, found.values())) > 10
    assert {file: names for file, names in found.items() if not all(name.startswith(ABOVE) for name in names)} == {}


def test_the_measure_finds_what_is_planted() -> None:
    source = (
        'import logging\nA = logging.getLogger(__name__)\nB = logging.getLogger("vllm.pdcluster.b")\nC = getLogger()\n'
    )
    assert loggers_in(source) == ["__name__", "'vllm.pdcluster.b'", ""]
