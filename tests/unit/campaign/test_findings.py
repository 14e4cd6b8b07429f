"""Each thing that must be zero is found when it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from campaign.client import Order
from campaign.findings import Ended, EngineState, Findings
from campaign.outcomes import End, Verdict
from campaign.questions import Question

IDLE: Final = EngineState()
LEFT: Final = {"prefill-0": EngineState(left=({"pushes": 0, "writes": 0}, {"pushes": 2, "writes": 1}))}


def ended(*ends: End) -> list[Ended]:
    return [Ended(Order(0, Question((1,), 1), False), "id", Verdict(end), 0.0, 1.0) for end in ends]


FINE: Final = ended(End.OK, End.ERROR, End.LEFT, End.ROUTER_LOST)
GOOD: Final = Findings(FINE, ended(End.OK), at_start={"prefill-0": IDLE}, at_end={"prefill-0": IDLE})


def test_right_answers_clear_errors_and_clients_that_left_are_good() -> None:
    assert GOOD.is_good
    assert not any(GOOD.zeros().values())


@pytest.mark.parametrize(
    ("name", "count", "changed"),
    [
        *((name, 1, {"requests": [*FINE, *ended(end)]}) for end, name in (
            (End.HUNG, "hung"), (End.WRONG, "wrong tokens"), (End.UNCLEAR, "unclear ends"))),
        *(("not answered after the faults", 1, {"afterwards": ended(End.OK, end)}) for end in End if end is not End.OK),
        *(("engines with leaked blocks", 1, {"at_end": {"prefill-0": after}}) for after in (
            replace(IDLE, used_share=1 / 64), replace(IDLE, num_running=1.0), replace(IDLE, num_waiting=1.0),
            EngineState(problem="ConnectionRefusedError"))),
        ("engines with leaked blocks", 1, {"at_end": {}}),
        ("left on ranks", 3, {"at_start": LEFT, "at_end": LEFT}),
        ("deaths not injected", 1, {"deaths": ["decode-2 ended"]}),
        ("orphan processes", 1, {"orphans": ["process 7"]}),
        ("ports still open", 1, {"ports_left": [20001]}),
        ("campaign broken off", 1, {"breakdown": "prefill-0 does not start"}),
        ("too few right answers", 1, {"requests": ended(End.OK, *[End.ERROR] * 9)}),
        ("hung", 0, {"requests": []}),
        ("hung", 0, {"afterwards": []}),
        ("hung", 0, {"at_start": {}, "at_end": {}}),
    ],
)  # fmt: skip
def test_what_must_be_zero_is_counted_and_is_not_good(name: str, count: int, changed: dict[str, Any]) -> None:
    """With 0 the campaign did not run: nothing is counted, and it is not good either."""
    findings = replace(GOOD, **changed)
    assert findings.zeros()[name] == count
    assert not findings.is_good
