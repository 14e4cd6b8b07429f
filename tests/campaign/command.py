"""The command line of the fault campaign: real engines, real router, seeded faults, one report.

    python -m tests.campaign --requests 500 --seed 1 --report report.md

Exit status: 0 all that must be zero is zero, 1 it is not, 2 the command line is wrong. Logs of all processes stay in
the folder that is named when something is not good.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

from campaign.build import CONNECTOR, Setup
from campaign.cluster import started_at
from campaign.report import markdown, summary_line
from campaign.run import Options, Record, run
from integration.harness import harness_env, zygote_modules
from integration.processes import is_port_free, is_running
from pdcluster_cli.models.tiny_model import ensure_tiny_model
from pdcluster_cli.processes.engines import SCRATCH
from pdcluster_cli.processes.zygote import Zygote
from pdcluster_protocol.params import ContentCheck

Start: TypeAlias = Callable[[Path], AbstractContextManager[Zygote]]
"""Gives a zygote that logs to the file. What was started from it has ended when the ``with`` is over."""


def own_zygote(log_path: Path) -> Zygote:
    """That of the tests: it imports vLLM first, and ranks of one engine wait for each other without a core each."""
    return Zygote(zygote_modules(), env=harness_env(), log_path=log_path, scratch=SCRATCH)


def main(arguments: Sequence[str], start: Start = own_zygote) -> int:
    """Run a campaign. Returns the exit status."""
    given = _parser().parse_args(arguments)
    options = Options(given.requests, given.seed, given.concurrency, given.rate, given.every)
    command = "python -m tests.campaign " + " ".join(arguments)
    folder: Path = given.logs or Path(tempfile.mkdtemp(prefix="pdcluster-campaign-"))
    setup = Setup(
        ensure_tiny_model(), folder, options.seed, given.connector, ContentCheck(given.content_check),
        given.prefill_tp, given.decode_tp,
    )  # fmt: skip
    record = _run_in(setup, options, start)
    report = markdown(record, command, time.monotonic() - record.began_at)
    print(report)
    if given.report is not None:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        given.report.write_text(report)
    if record.findings.is_good and given.logs is None:
        shutil.rmtree(folder)
    else:
        print(f"the logs are in {folder}", file=sys.stderr)
    print(summary_line(record, command))
    return 0 if record.findings.is_good else 1


def _run_in(setup: Setup, options: Options, start: Start) -> Record:
    """The record, with what was left when every process should have gone."""
    with start(setup.folder / "zygote.log") as zygote:
        record = asyncio.run(run(options, setup, zygote))
    record.findings.orphans = orphans(record.pids)
    record.findings.ports_left = [port for port in record.ports if not is_port_free(port)]
    return record


def orphans(processes: set[tuple[int, str]]) -> list[str]:
    """Those of the processes (id and start time) that still run."""
    return [f"process {pid}" for pid, started in processes if is_running(pid) and started_at(pid) == started]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description="Random faults on real engines.")
    add = parser.add_argument
    add("--requests", type=int, default=500, help="how many requests (default: 500)")
    add("--seed", type=int, default=1, help="of the requests and the faults (default: 1)")
    add("--report", type=Path, help="write the report there, too")
    add("--logs", type=Path, help="an existing folder for the logs; kept (default: a new one, kept if not good)")
    add("--concurrency", type=int, default=12, help="requests in flight at most (default: 12)")
    add("--rate", type=float, default=8.0, help="requests per second, in bursts (default: 8)")
    add("--every", type=int, default=8, help="requests between two faults (default: 8)")
    add("--connector", default=CONNECTOR, help=f"module:class that prefill engines load (default: {CONNECTOR})")
    checks, check = [check.value for check in ContentCheck], ContentCheck.SAMPLED.value
    add("--content-check", choices=checks, default=check, help=f"what decode engines compare (default: {check})")
    add("--prefill-tp", type=int, default=1, help="ranks of each prefill engine (default: 1)")
    add("--decode-tp", type=int, default=1, help="ranks of each decode engine (default: 1)")
    return parser
