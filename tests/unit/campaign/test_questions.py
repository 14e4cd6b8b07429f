"""Which answers are right for engines that are split otherwise than the single one."""

from __future__ import annotations

import pytest

from campaign.questions import margin_of


def test_an_answer_is_as_clear_as_its_closest_choice() -> None:
    steps = [{"token_id:7": -0.1, "token_id:9": -3.0}, {"token_id:8": -0.75, "token_id:4": -0.5, "token_id:3": -9.0}]
    assert margin_of(steps) == pytest.approx(0.25)
