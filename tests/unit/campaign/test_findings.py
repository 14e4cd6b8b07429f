"""Each thing that must be zero is found when it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from campaign.client import Order
from campaign.findings import Ended, EngineState, Findings, leaks, percentile
from campaign.outcomes import End, Verdict
from campaign.questions import Question

IDLE = EngineState()


def ended(end: End) -> Ended:
    return Ended(Order(0, Question((1,), 1), False), "id", Verdict(end), 0.0, 1.0)


def good() -> Findings:
    return Findings(
        requests=[ended(End.OK), ended(End.ERROR), ended(End.LEFT), ended(End.ROUTER_LOST)],
        afterwards=[ended(End.OK)],
        at_start={"prefill-0": IDLE},
        at_end={"prefill-0": IDLE},
    )


def test_right_answers_clear_errors_and_clients_that_left_are_good() -> None:
    assert good().is_good
    assert not any(good().zeros().values())


@pytest.mark.parametrize(
    ("end", "name"), [(End.HUNG, "hung"), (End.WRONG, "wrong tokens"), (End.UNCLEAR, "unclear ends")]
)
def test_one_bad_end_among_good_ones_is_counted(end: End, name: str) -> None:
    findings = good()
    findings.requests.append(ended(end))
    assert findings.zeros()[name] == 1
    assert not findings.is_good


@pytest.mark.parametrize("end", [end for end in End if end is not End.OK])
def test_after_the_faults_nothing_but_an_answer_will_do(end: End) -> None:
    findings = good()
    findings.afterwards.append(ended(end))
    assert findings.zeros()["not answered after the faults"] == 1
    assert not findings.is_good


@pytest.mark.parametrize(
    "after",
    [
        replace(IDLE, used_share=1 / 64),
        replace(IDLE, num_running=1.0),
        replace(IDLE, num_waiting=1.0),
        EngineState(problem="ConnectionRefusedError"),
    ],
    ids=["one block in use", "one running", "one waiting", "does not tell"],
)
def test_an_engine_that_is_not_as_it_was_has_leaked(after: EngineState) -> None:
    findings = good()
    findings.at_end = {"prefill-0": after}
    assert findings.zeros()["engines with leaked blocks"] == 1
    assert not findings.is_good


def test_what_a_rank_still_has_is_counted_also_if_it_had_it_at_the_start() -> None:
    findings = good()
    left = EngineState(left=({"pushes": 0, "writes": 0}, {"pushes": 2, "writes": 1}))
    findings.at_start = findings.at_end = {"prefill-0": left}
    assert findings.zeros()["left on ranks"] == 3
    assert not findings.is_good


def test_an_engine_that_nobody_looked_at_has_leaked() -> None:
    assert leaks({"prefill-0": IDLE}, {}) != []


def test_deaths_orphans_open_ports_and_a_campaign_that_broke_off_are_counted() -> None:
    findings = good()
    findings.deaths, findings.orphans, findings.ports_left = ["decode-2 ended"], ["process 7"], [20001]
    findings.breakdown = "prefill-0 does not start"
    zeros = {name: count for name, count in findings.zeros().items() if count}
    assert zeros == dict.fromkeys(
        ("deaths not injected", "orphan processes", "ports still open", "campaign broken off"), 1
    )


def test_a_campaign_in_which_almost_nothing_was_answered_proves_nothing() -> None:
    findings = good()
    findings.requests = [ended(End.OK), *[ended(End.ERROR)] * 9]
    assert findings.zeros()["too few right answers"] == 1


def test_a_campaign_that_did_not_run_is_not_good() -> None:
    assert not Findings().is_good
    assert not replace(good(), afterwards=[]).is_good


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([], 0.99) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(number) for number in range(1, 101)], 0.99) == 99.0
