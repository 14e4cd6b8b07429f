"""The tests of this folder are laws, and have their own limit of time."""

from __future__ import annotations

from pathlib import Path

import pytest

from patience import HANGS_S


@pytest.hookimpl(tryfirst=True)  # before marks are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All examples of ``make test-all`` take minutes on a busy machine; pytest's own limit is for one case."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.law)
            item.add_marker(pytest.mark.timeout(HANGS_S))
