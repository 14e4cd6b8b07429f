"""What the operator's metrics and the clocks of ``operator_scale`` add up to."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.operator_figures import (
    Bare,
    Call,
    Counts,
    Lag,
    Phase,
    Snapshot,
    Usage,
    format_calls,
    format_lags,
    format_references,
    num_changed,
    own_share,
    parse_counts,
    phase_between,
)

from pdcluster_operator.http_kube import ApiCall as RealCall
from pdcluster_operator.kinds import LEASE, PDCLUSTER, POD
from pdcluster_operator.metrics import Metrics
from pdcluster_operator.work_queue import RunOutcome

PATCH = Call("patch", "pdclusters/status", 200)
GET = Call("get", "services", 404)
RENEWAL = Call("update", "leases", 200)


def rows(table: str) -> list[list[str]]:
    """Cells of a Markdown table, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_operators_own_page_is_read_and_a_write_is_what_changes_an_object_other_than_the_lease() -> None:
    metrics = Metrics()
    for status in (200, 200, 409):
        metrics.count_call(RealCall("patch", PDCLUSTER, "PATCH", "/x", subresource="status"), status)
    for verb in ("list", "watch", "get", "create", "delete"):
        metrics.count_call(RealCall(verb, POD, "GET", "/x"), 0)
    metrics.count_call(RealCall("update", LEASE, "PUT", "/x"), 200)
    metrics.count_run(RunOutcome.DONE, 0.1)
    metrics.count_run(RunOutcome.CONFLICT, 7.0)
    metrics.watch_replica(lambda: True, lambda: 1, lambda: 0.5, lambda: 0)
    counts = parse_counts(metrics.page().decode())
    assert (counts.calls[PATCH], counts.calls[RENEWAL], counts.calls[Call("list", "pods", 0)]) == (2, 1, 1)
    assert counts.runs == {"done": 1, "conflict": 1}
    assert (counts.num_runs, counts.num_writes) == (2, 5)
    assert counts.by_verb() == {"patch": 3, "list": 1, "watch": 1, "get": 1, "create": 1, "delete": 1}


def test_a_phase_is_what_came_between_two_snapshots_and_its_calls_are_shown_for_each_look() -> None:
    before = Snapshot(100.0, {"operator": Usage(3.0, 50.0, 55.0)}, Counts(Counter({GET: 4, PATCH: 1})), 10)
    calls = Counter({GET: 7, PATCH: 7, RENEWAL: 9})
    after = Snapshot(107.5, {"operator": Usage(4.5, 60.0, 70.0)}, Counts(calls, Counter(done=3, conflict=1)), 1210)
    found = phase_between("churn", before, after)
    assert (found.seconds, found.usages) == (7.5, {"operator": Usage(1.5, 60.0, 70.0)})
    assert rows(format_calls([found])) == [["churn", "4", "1", "3 (0.8)", "6 (1.5)", "1,200"]]


@pytest.mark.parametrize(
    ("after", "num"),
    [({"a": "1", "b": "1"}, 0), ({"a": "2", "b": "1"}, 1), ({"a": "2", "c": "1"}, 3), ({}, 2)],
)
def test_an_object_has_changed_when_it_is_new_gone_or_another_version(after: dict[str, str], num: int) -> None:
    assert num_changed({"a": "1", "b": "1"}, after) == num


def test_lags_are_shares_of_all_changes_in_milliseconds() -> None:
    lags = [Lag(0.010 * number, 0.030 * number) for number in range(1, 11)]
    assert [row[1:] for row in rows(format_lags(lags))] == [
        ["50", "90", "100", "100"],
        ["150", "270", "300", "300"],
        ["100", "180", "200", "200"],
    ]


def test_the_references_are_beside_and_in_ratios_and_the_load_is_a_share_of_all_processes() -> None:
    counts = Counts(Counter({PATCH: 1500, GET: 400, RENEWAL: 5}))
    usages = {"operator": Usage(6.0, 60.0, 80.0), "this program": Usage(2.0, 60.0, 80.0)}
    phase = Phase("create", 10.0, usages, counts, 500)
    assert rows(format_references(Bare(1000, 5.0, 4.0), phase)) == [
        ["seconds", "10.0", "5.0", "2.00", "4.7", "2.13"],
        ["CPU s of the client", "6.0", "4.0", "1.50", "1.4 to 2.1", ""],
        ["writes/s, of all who write", "200", "200", "1.00", "319", "0.63"],
        ["peak MiB", "80", "", "", "80.1", "1.00"],
    ]
    assert own_share([phase, phase]) == 0.25
