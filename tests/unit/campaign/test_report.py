"""A fault counts in a report only when it was seen to strike, and times are those of right answers."""

from __future__ import annotations

import json

from campaign.client import Order
from campaign.findings import Ended, Findings
from campaign.injector import Injected
from campaign.outcomes import End, Verdict
from campaign.questions import Question
from campaign.report import markdown, summary_line
from campaign.run import Options, Record
from campaign.schedule import Deed, Fault, Site


def record() -> Record:
    met = [(Deed.KILL_RANK, 1), (Deed.STOP_RANK, 0), (Deed.HANG, 3), (Deed.HANG, 0), (Deed.HANG, 2)]
    injected = [Injected(Fault(0, Site.PREFILL, deed, 1, 0), "prefill-0", 0, 1, num_met) for deed, num_met in met]
    ends = [*((End.OK, float(seconds)) for seconds in range(1, 101)), (End.ERROR, 900.0)]
    order = Order(0, Question((1,), 1), False)
    requests = [Ended(order, "id", Verdict(end), 5.0, 5.0 + seconds) for end, seconds in ends]
    return Record(Options(1, 1, 1, 1.0, 1), findings=Findings(requests), injected=injected)


def test_a_report_counts_what_struck_and_says_what_did_not() -> None:
    lines = [line for line in markdown(record(), "", 1.0).splitlines() if line.startswith("| prefill: ")]
    assert lines == [
        "| prefill: SIGKILL of one rank | 1 | 1 |  |",
        "| prefill: SIGSTOP of one rank | 0 |  | 1 |",
        "| prefill: hangs | 2 | 5 | 1 |",
    ]
    summary = json.loads(summary_line(record(), ""))
    assert (summary["faults"], summary["p50_s"], summary["p99_s"]) == (5, 50.0, 99.0)
    assert summary["struck"] == {"prefill: SIGKILL of one rank": 1, "prefill: hangs": 2}
