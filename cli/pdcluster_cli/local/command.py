"""``pdcluster local`` from first check to last stop. Knows the order of things; the things are its neighbours'.

Signals: SIGINT and SIGTERM raise where the main thread is; everything is undone on the way out. A second one during the
clean-up is ignored, for the clean-up is bounded. What a SIGKILL leaves behind ends by itself (``zygote_process.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from pdcluster_cli import checks
from pdcluster_cli.engines import SCRATCH, preload_modules, secret_env, zygote_env
from pdcluster_cli.local.chat import ChatError, served_model, stream_answer
from pdcluster_cli.local.options import Machine, Options, parse_options, plan_engines
from pdcluster_cli.local.pool import Member, RouterPlan, find_dead, start_members
from pdcluster_cli.local.report import build_report, format_report
from pdcluster_cli.local.traces import PushTrace, RequestTrace, pushes_in, read_traces, requests_in
from pdcluster_cli.tiny_model import CORPUS, cache_root, ensure_tiny_model
from pdcluster_cli.waiting import EngineDied, free_port
from pdcluster_cli.zygote import Zygote, ZygoteError

QUESTION: Final = f"Please read this.\n{CORPUS * 3}\nWho writes the answer?"
"""Long enough that there is a transfer to see: about 1,200 tokens of the tiny model."""
MAX_ANSWER_TOKENS: Final = 64
ANSWER_TIMEOUT_S: Final = 600.0
TRACE_WAIT_S: Final = 5.0
"""A trace line is written when the last byte is acknowledged, which may be after the answer's end."""
KEPT_RUNS: Final = 10
"""Folders with logs and traces of earlier starts that are kept."""


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM came. ``exit_status`` follows the shell's rule: 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_status = 128 + number


@dataclass(frozen=True, slots=True)
class Run:
    """One start of the pool, decided and not yet done."""

    options: Options
    machine: Machine
    model: Path
    folder: Path

    @property
    def router(self) -> RouterPlan:
        return RouterPlan(self.options.port, self.folder / "router.log", self.folder / "router.trace")


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0 after the answer or Ctrl-C while serving, 1 after a failure, 130 or 143 if stopped earlier."""
    options = parse_options(arguments)
    if problems := _problems(options):
        for problem in problems:
            print(f"pdcluster: {problem}", file=sys.stderr)
        return 1
    with _signals_raise():
        try:
            return _serve(_prepare(options))
        except (EngineDied, ZygoteError, ChatError, OSError) as error:
            print(f"pdcluster: {error}", file=sys.stderr)
            return 1
        except Stopped as stopped:
            return stopped.exit_status


def _problems(options: Options) -> list[str]:
    findings = [checks.check_system_libraries(), checks.check_modules(), checks.check_port(options.port)]
    if options.model is not None:
        findings.append(checks.check_model(options.model))
    return checks.problems_of(findings)


def _prepare(options: Options) -> Run:
    device = options.device or checks.detect_device()
    num_cores = len(os.sched_getaffinity(0))
    if options.model is None:
        _say("no --model given: a tiny model that says nothing sensible will do")
    return Run(
        options=options,
        machine=Machine(device, num_cores, checks.count_accelerators(device)),
        model=options.model or ensure_tiny_model(),
        folder=_make_run_folder(cache_root(os.environ) / "runs"),
    )


def _serve(run: Run) -> int:
    engine_ports = [free_port() for _ in range(run.options.prefill + run.options.decode)]
    plans = plan_engines(run.options, run.machine, model=run.model.resolve(), folder=run.folder, ports=engine_ports)
    _say(f"logs are in {run.folder}")
    modules = preload_modules(run.machine.device)
    env = {**zygote_env(run.machine.device), **secret_env(os.environ)}  # All others are forks of the zygote.
    with _zygote(Zygote(modules, env=env, log_path=run.folder / "import.log", scratch=SCRATCH)) as zygote:
        members = start_members(zygote, plans, run.router, _say)
        traces = [run.router.trace_file, *(plan.trace_file for plan in plans if plan.trace_file)]
        _ask_first_question(run.options, members, traces)
        return 0 if run.options.is_once else _serve_until_stopped(run.options.port, members)


def _ask_first_question(options: Options, members: Sequence[Member], traces: Sequence[Path]) -> None:
    try:
        model = served_model(options.port, timeout_s=ANSWER_TIMEOUT_S)
        began = time.monotonic()
        _consume(stream_answer(options.port, model, "Hello", max_tokens=1, timeout_s=ANSWER_TIMEOUT_S))
        _say(f"a first request went through both engines in {time.monotonic() - began:.2f} s")
        question = options.question or QUESTION
        print(f"\nQuestion: {_shortened(question)}\nAnswer:   ", end="", flush=True)
        answer = stream_answer(options.port, model, question, max_tokens=MAX_ANSWER_TOKENS, timeout_s=ANSWER_TIMEOUT_S)
        for piece in answer:
            print(piece, end="", flush=True)
        print("\n")
    except ChatError as error:
        raise find_dead(members, 2.0) or error from error
    print(_report_text(traces), end="\n\n")
    print(_curl_line(options.port, model), flush=True)


def _serve_until_stopped(port: int, members: Sequence[Member]) -> int:
    _say(f"serving on http://127.0.0.1:{port}/v1 until Ctrl-C")
    try:
        dead = find_dead(members, None)
    except Stopped:
        _say("stopping")
        return 0
    assert dead is not None
    raise dead


def _report_text(traces: Sequence[Path]) -> str:
    deadline = time.monotonic() + TRACE_WAIT_S
    request, pushes = _newest_request(traces)
    while not pushes and time.monotonic() < deadline:
        time.sleep(0.05)
        request, pushes = _newest_request(traces)
    report = build_report(request, pushes) if request is not None else None
    if report is None:
        return "No transfer report: the traces hold no finished push for this request"
    return format_report(report)


def _newest_request(traces: Sequence[Path]) -> tuple[RequestTrace | None, list[PushTrace]]:
    lines = read_traces(traces)
    requests = requests_in(lines)
    if len(requests) < 2:  # the very first one is not the question
        return None, []
    return requests[-1], pushes_in(lines, requests[-1].transfer_id)


def _curl_line(port: int, model: str) -> str:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}'
    return f"curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def _make_run_folder(runs: Path) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    ended = sorted(folder for folder in runs.iterdir() if folder.is_dir() and not _is_running(folder))
    for old in ended[: -KEPT_RUNS + 1]:
        shutil.rmtree(old, ignore_errors=True)
    folder = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir()
    return folder


def _is_running(folder: Path) -> bool:
    """Whether the process that made the folder, which its name ends with, still runs."""
    return Path("/proc", folder.name.rpartition("-")[2]).exists()


@contextlib.contextmanager
def _zygote(zygote: Zygote) -> Iterator[Zygote]:
    """The zygote and its engines end whatever happens, and signals cannot interrupt that."""
    try:
        yield zygote
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        zygote.stop()


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _consume(pieces: Iterator[str]) -> None:
    for _ in pieces:
        pass


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 120 else f"{line[:70]} [...] {line[-40:]}"


def _say(line: str) -> None:
    print(f"pdcluster: {line}", file=sys.stderr, flush=True)
