"""A fault counts in a report only when it was seen to strike."""

from __future__ import annotations

import json

from campaign.injector import Injected
from campaign.report import markdown, summary_line
from campaign.run import Options, Record
from campaign.schedule import Deed, Fault, Site


def carried_out(deed: Deed, num_met: int) -> Injected:
    return Injected(Fault(0, Site.PREFILL, deed, 1.0, 0.0), "prefill-0", 0.0, 1.0, num_met)


def record() -> Record:
    met = [(Deed.KILL_RANK, 1), (Deed.STOP_RANK, 0), (Deed.HANG, 3), (Deed.HANG, 0), (Deed.HANG, 2)]
    return Record(Options(1, 1, 1, 1.0, 1), injected=[carried_out(deed, num_met) for deed, num_met in met])


def test_the_table_counts_what_struck_and_says_what_did_not() -> None:
    lines = [line for line in markdown(record(), "", 1.0).splitlines() if line.startswith("| prefill: ")]
    assert lines == [
        "| prefill: SIGKILL of one rank | 1 | 1 |  |",
        "| prefill: SIGSTOP of one rank | 0 |  | 1 |",
        "| prefill: hangs | 2 | 5 | 1 |",
    ]


def test_the_summary_counts_what_struck_beside_all_that_were_carried_out() -> None:
    summary = json.loads(summary_line(record(), ""))
    assert summary["faults"] == 5
    assert summary["struck"] == {"prefill: SIGKILL of one rank": 1, "prefill: hangs": 2}
