"""The folders of earlier starts."""

from __future__ import annotations

import os
from pathlib import Path

from pdcluster_cli.local.command import KEPT_RUNS, _make_run_folder


def test_the_newest_starts_that_ended_are_kept_and_each_that_runs(tmp_path: Path) -> None:
    no_process = 1 << 30
    ended = [tmp_path / f"20250101-0000{second}-{no_process}" for second in range(10, 10 + 2 * KEPT_RUNS)]
    running = tmp_path / f"20240101-000000-{os.getpid()}"
    for folder in (*ended, running):
        folder.mkdir()
    made = _make_run_folder(tmp_path)
    assert set(tmp_path.iterdir()) == {made, running, *ended[-KEPT_RUNS + 1 :]}
