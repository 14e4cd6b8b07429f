"""What a start of the pool is made of: the router's command line, and the folders of earlier starts."""

from __future__ import annotations

import os
from pathlib import Path

from pdcluster_cli.local.command import KEPT_RUNS, Run, _make_run_folder, serving_text
from pdcluster_cli.local.options import parse_options
from pdcluster_cli.local.plan import Machine, plan_engines
from pdcluster_cli.local.pool import router_spec
from pdcluster_cli.models.model_source import ModelSource
from pdcluster_cli.processes.engines import LocalDevice
from pdcluster_protocol.launch import RouterPolicy
from pdcluster_router.__main__ import parse_settings


def test_the_newest_starts_that_ended_are_kept_and_each_that_runs(tmp_path: Path) -> None:
    no_process = 1 << 30
    ended = [tmp_path / f"20250101-0000{second}-{no_process}" for second in range(10, 10 + 2 * KEPT_RUNS)]
    running = tmp_path / f"20240101-000000-{os.getpid()}"
    for folder in (*ended, running):
        folder.mkdir()
    made = _make_run_folder(tmp_path)
    assert set(tmp_path.iterdir()) == {made, running, *ended[-KEPT_RUNS + 1 :]}


def test_the_router_chooses_as_the_user_says_and_as_it_does_by_itself_where_they_say_nothing(tmp_path: Path) -> None:
    chosen = {words: _router_policy(tmp_path, *words) for words in [(), ("--policy", "affinity")]}
    assert chosen == {(): RouterPolicy.LEAST_TOKENS, ("--policy", "affinity"): RouterPolicy.AFFINITY}


def _router_policy(folder: Path, *words: str) -> RouterPolicy:
    """Of the router that ``pdcluster local`` starts when it is given ``words``."""
    run = Run(parse_options(words), Machine(LocalDevice.CPU, 8, 0), ModelSource("m"), folder)
    plans = plan_engines(run.options, run.machine, model="m", folder=folder, ports=[8100, 8200])
    return parse_settings(router_spec(plans, run.router).argv).policy


def test_where_to_look_at_the_pool_is_said_with_the_url_where_top_and_why_do_not_know_it() -> None:
    assert serving_text(8000, 8001) == (
        "serving on http://127.0.0.1:8000/v1 until Ctrl-C; "
        "its state: http://127.0.0.1:8001/status, `pdcluster top`, `pdcluster why ID`"
    )
    assert "`pdcluster why ID --url http://127.0.0.1:4321`" in serving_text(8000, 4321)
