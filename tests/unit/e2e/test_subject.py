"""What stories on a cluster may ask an engine in a pod for."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

E2E: Final = Path(__file__).resolve().parents[3] / "e2e"
ASKS_FOR_ANSWERS_ALONE: Final = {"Answer", "Question", "ask_single_engine", "make_questions"}
"""``tests/integration/test_campaign_questions.py`` holds that ``ask_single_engine`` asks for no logprobs."""


def test_stories_take_from_the_campaign_only_questions_without_logprobs() -> None:
    """vLLM compiles what logprobs need with a C++ compiler, which a pod does not have, and its core ends."""
    taken: set[str] = set()
    for path in E2E.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "campaign.questions":
                taken |= {alias.name for alias in node.names}
            assert not (isinstance(node, ast.Import) and any(a.name.startswith("campaign") for a in node.names)), path
            assert not (isinstance(node, ast.ImportFrom) and node.module == "campaign"), path
    assert "ask_single_engine" in taken
    assert taken <= ASKS_FOR_ANSWERS_ALONE


def test_no_story_says_logprobs() -> None:
    assert [path.name for path in E2E.glob("*.py") if "logprobs" in path.read_text()] == []
