"""Every promise holds in every state of the small scope."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from model.scopes import small
from model.walk import Walk


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """The cores' shells would log each failure of each branch."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(900)  # a minute; on a busy machine several
def test_every_promise_holds_in_every_state_of_the_small_scope(capsys: pytest.CaptureFixture[str]) -> None:
    figures = [Walk(plan).run() for plan in small()]
    assert all(seen.is_whole and seen.num_terminal for seen in figures)
    with capsys.disabled():
        print(f"\n{sum(seen.num_states for seen in figures):,} states in {len(figures)} plans")
