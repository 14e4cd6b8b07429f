from __future__ import annotations

import pytest
from e2e.command import pytest_command
from e2e.warm import compiling_env


@pytest.mark.parametrize("words", [[], ["-k", "router"], ["--maxfail=1"]])
def test_all_stories_are_told_unless_some_are_named(words: list[str]) -> None:
    assert pytest_command(words)[-1] == "e2e"


def test_a_named_story_is_told_alone() -> None:
    name = "e2e/test_node.py::test_a_killed_container_is_started_again_in_its_pod"
    assert "e2e" not in pytest_command(["-x", name])


def test_what_engines_import_is_compiled_where_tests_keep_no_bytecode() -> None:
    assert compiling_env({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/x", "HOME": "/h"}) == {"HOME": "/h"}
