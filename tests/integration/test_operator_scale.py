"""``operator_scale`` in small, on a real API server: what it measures must happen at all, and at rest nothing may."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.operator_scale import QUICK, Report, format_report, measure

pytestmark = [pytest.mark.control_plane, pytest.mark.slow]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return asyncio.run(measure(QUICK, tmp_path_factory.mktemp("operator-scale")))


def test_the_operator_writes_nothing_at_rest_but_its_lease(report: Report) -> None:
    assert report.faults() == []
    assert {call.resource for call in report.phases["at rest"].counts.calls} <= {"leases"}
    assert report.phases["at rest"].by_hand == 0


def test_every_phase_did_its_work(report: Report) -> None:
    assert list(report.phases) == ["create", "at rest", "scale", "churn"]
    counts = {name: phase.counts for name, phase in report.phases.items()}
    assert counts["create"].num_writes >= report.bare.num_objects == 18 * QUICK.clusters
    assert counts["scale"].by_verb()["patch"] >= 2 * QUICK.clusters
    assert all(counts[name].num_runs > 0 for name in ("create", "scale", "churn"))


def test_every_change_of_a_pod_was_shown_and_got_into_a_status(report: Report) -> None:
    assert len(report.lags) >= QUICK.num_changes // 2
    # Two watches show them: on a busy machine either may be the late one.
    assert all(lag.pod_s > 0 and lag.status_s > 0 for lag in report.lags)


def test_memory_and_cpu_are_those_of_four_processes(report: Report) -> None:
    usages = report.phases["create"].usages
    assert set(usages) == {"operator", "etcd", "api-server", "this program"}
    assert usages["operator"].cpu_s > 0
    assert all(usage.peak_mib >= usage.resident_mib > 10 for usage in usages.values())


def test_its_page_has_every_table(report: Report) -> None:
    assert format_report(report).count("| --- |") >= 4
