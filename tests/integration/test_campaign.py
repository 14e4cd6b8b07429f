"""The fault campaign in small: fixed seeds against real engines, and a connector that it must find out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from campaign.command import main
from campaign.schedule import Site, rank_deck
from integration.harness import Harness, eventually
from integration.processes import descendants, is_running
from pdcluster_cli.processes.linux import die_with_parent
from pdcluster_cli.processes.zygote import Zygote
from pdcluster_protocol.params import ContentCheck

pytestmark = pytest.mark.engines

ROOT: Final = Path(__file__).resolve().parents[2]
TIMEOUT_S: Final = 3000


def run_campaign(logs: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the summary and the whole output."""
    command = [sys.executable, "-m", "tests.campaign", "--logs", str(logs), *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
        preexec_fn=partial(die_with_parent, os.getpid()),  # a killed test run leaves nothing
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


@contextmanager
def lent(zygote: Zygote) -> Iterator[Zygote]:
    """It goes on; what was started from it meanwhile is killed."""
    before = descendants(zygote.pid)
    try:
        yield zygote
    finally:
        for pid in (started := descendants(zygote.pid) - before):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not any(map(is_running, started)))


@pytest.mark.costly
def test_of_requests_among_faults_none_hangs_or_lies_and_nothing_leaks(
    harness: Harness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the zygote of all tests, for to import vLLM takes longer than these requests."""
    status = main(("--logs", str(tmp_path), "--requests", "80", "--seed", "1"), lambda _: lent(harness.zygote))
    output = capsys.readouterr().out
    assert status == 0, output
    require_clean(json.loads(output.splitlines()[-1]), count=80, num_faults=4)


@pytest.mark.slow
def test_of_many_requests_among_faults_none_hangs_or_lies_and_nothing_leaks(tmp_path: Path) -> None:
    """By the command that CONTRIBUTING names."""
    status, summary, output = run_campaign(tmp_path, "--requests", "500", "--seed", "1")
    assert status == 0, output
    require_clean(summary, count=500, num_faults=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "site"), [("--prefill-tp", Site.PREFILL), ("--decode-tp", Site.DECODE)], ids=["TP 2 to 1", "TP 1 to 2"]
)
def test_a_rank_that_dies_stops_or_cannot_write_makes_nothing_hang_or_lie_and_nothing_leaks(
    harness: Harness, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, site: Site
) -> None:
    """With this seed each is a second rank, where there is one."""
    split = ("--requests", "40", "--seed", "6", flag, "2")
    status = main(("--logs", str(tmp_path), *split), lambda _: lent(harness.zygote))
    output = capsys.readouterr().out
    assert status == 0, output
    summary = json.loads(output.splitlines()[-1])
    require_clean(summary, count=40, num_faults=3)
    for at, deed in rank_deck([site]):
        assert summary["struck"].get(f"{at.value}: {deed.value}", 0) > 0, output


def require_clean(summary: dict[str, Any], *, count: int, num_faults: int) -> None:
    assert sum(summary["ends"].values()) == count
    assert summary["faults"] >= num_faults
    assert set(summary["zeros"].values()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize(("check", "lies"), [(ContentCheck.OFF, True), (ContentCheck.FULL, False)])
def test_a_campaign_finds_a_connector_that_writes_only_half_of_each_range(
    harness: Harness, tmp_path: Path, capsys: pytest.CaptureFixture[str], check: ContentCheck, lies: bool
) -> None:
    """Where content is compared each request is an error or is computed by decode; the campaign finds the rest."""
    broken = ("--connector", "integration.broken:CutsARangeShort", "--content-check", check.value)
    status = main(("--logs", str(tmp_path), "--requests", "24", "--seed", "1", *broken), lambda _: lent(harness.zygote))
    output = capsys.readouterr().out
    summary = json.loads(output.splitlines()[-1])
    assert sum(summary["ends"].values()) == 24
    assert (summary["zeros"]["wrong tokens"] > 20) is lies, output
    assert lies or summary["zeros"]["wrong tokens"] == 0, output
    assert status == 1, output
    assert summary["zeros"]["deaths not injected"] == 0
