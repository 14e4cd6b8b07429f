"""What Prometheus is told of a PDCluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from operator_cases.statuses import ALL_READY, NEXT, WELL, WELL_STATUS
from pdcluster_operator.core.status.conditions import Counts, Status
from pdcluster_operator.core.status.gauges import not_ready_s, sample_of
from pdcluster_operator.core.status.pool_status import Facts, reduce_status
from pdcluster_operator.metrics import Metrics

LOST: Final = replace(WELL, decode=replace(ALL_READY, ready=1, updated_ready=1))
ROLLING: Final = reduce_status(NEXT, WELL_STATUS, now=2000)


@pytest.mark.parametrize(
    ("facts", "before", "seconds"),
    [
        pytest.param(WELL, WELL_STATUS, 0, id="ready"),
        pytest.param(LOST, WELL_STATUS, 700, id="one is lost, and the rollout was complete long ago"),
        pytest.param(NEXT, ROLLING, 1000, id="a rollout that stands still since it began"),
        pytest.param(replace(NEXT, prefill=replace(NEXT.prefill, updated=2)), ROLLING, 700, id="a rollout that moves"),
        pytest.param(replace(NEXT, is_paused=True), ROLLING, 0, id="paused"),
        pytest.param(replace(NEXT, refusal="no"), ROLLING, 0, id="refused: another alert tells"),
        pytest.param(replace(WELL, prefill=Counts(), decode=Counts()), WELL_STATUS, 0, id="stopped"),
    ],
)
def test_for_how_long_it_is_not_ready_though_it_should_be(facts: Facts, before: Status, seconds: int) -> None:
    assert not_ready_s(reduce_status(facts, before, now=2300), 3000) == seconds


def test_a_condition_has_one_series_and_an_object_that_is_gone_has_none() -> None:
    pools = [sample_of("team", "tiny", WELL_STATUS, 600, 3000)]
    metrics = Metrics()
    metrics.watch_pools(lambda: pools)
    page = metrics.page().decode()
    told = [line for line in page.splitlines() if line.startswith("pdcluster_operator_condition{")]
    assert len(told) == len(WELL_STATUS.conditions)
    assert 'pdcluster_operator_condition{condition="Ready",name="tiny",namespace="team",status="True"} 1.0' in told
    assert 'pdcluster_operator_progress_deadline_seconds{name="tiny",namespace="team"} 600.0' in page
    pools.clear()
    assert 'name="tiny"' not in metrics.page().decode()
