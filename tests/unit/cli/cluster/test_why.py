"""The order in which ``pdcluster why`` tells requests of one id, and what its status says."""

from __future__ import annotations

import pytest

from pdcluster_cli.cluster.why import _tell
from pdcluster_protocol.kept import KeptAnswer, KeptRequest

OLD = KeptRequest(request_id="R", model="old", ended_at_unix_s=1.0, outcome="ok")
NEW = KeptRequest(request_id="R", model="new", ended_at_unix_s=2.0, outcome="lost")
RUNS = KeptRequest(request_id="R", model="runs")
BUG = KeptRequest(request_id="R", model="bug", ended_at_unix_s=3.0)


@pytest.mark.parametrize(
    ("requests", "models", "status"),
    [
        ([OLD, NEW], ["new", "old"], 1),
        ([NEW, RUNS, OLD], ["runs", "new", "old"], 0),
        ([OLD], ["old"], 0),
        ([BUG, NEW], ["bug", "new"], 1),
    ],
)
def test_what_runs_comes_first_and_then_the_newest_whichever_router_has_it(
    requests: list[KeptRequest], models: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: dict[str, KeptAnswer | str] = {
        f"router-{number}": KeptAnswer(requests=(request,)) for number, request in enumerate(requests)
    }
    assert _tell("R", answers) == status
    told = capsys.readouterr().out
    assert sorted(models, key=lambda model: told.index(f"model {model}")) == models
