"""``pdcluster local`` from the first check to the last stop. Decides the order of steps; its neighbours carry them out.

SIGINT, SIGTERM and SIGHUP (a closed terminal) raise ``Stopped`` in the main thread, and everything is undone on the way
out. A second signal is ignored, because the clean-up is bounded. After a SIGKILL the other processes end by themselves
(``zygote_process.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Final, NoReturn

from pdcluster_cli import checks
from pdcluster_cli.local.chat import ChatError, QuestionRefused, prove_transfer, served_model, stream_answer
from pdcluster_cli.local.options import Options, parse_options
from pdcluster_cli.local.plan import Machine, plan_engines, problems_here, remarks, split_problems
from pdcluster_cli.local.pool import PoolProcess, RouterPlan, find_dead, start_members
from pdcluster_cli.local.report import build_report, format_report, pushes_in, read_traces, requests_in
from pdcluster_cli.models.model_source import ModelSource, find_model
from pdcluster_cli.models.tiny_model import CORPUS, cache_root, ensure_tiny_model
from pdcluster_cli.processes.engines import (
    LOOPBACK,
    OFFLINE,
    SCRATCH,
    patience_env,
    preload_modules,
    secret_env,
    zygote_env,
)
from pdcluster_cli.processes.waiting import EngineDied, NotReady, held_ports
from pdcluster_cli.processes.zygote import Zygote, ZygoteError
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.launch import ENGINE_KEY_VARIABLE, INTERNAL_PORT, router_flag
from pdcluster_protocol.secret import load_secret
from pdcluster_protocol.trace import PushTrace, RequestTrace

QUESTION: Final = f"Please read this.\n{CORPUS * 3}\nWho writes the answer?"
"""Long enough for a transfer worth a report: about 1,200 tokens of the tiny model."""
MAX_ANSWER_TOKENS: Final = 64
ANSWER_TIMEOUT_S: Final = 600.0
TRACE_WAIT_S: Final = 5.0
"""Seconds. A trace line is written when the last byte is acknowledged, which may be after the answer's end."""
KEPT_RUNS: Final = 10
"""Folders with logs and traces that are kept, the new start's included."""

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S: Final = 1.0
"""A second signal within this time is part of the first. A later one counts anew: Python may have dropped what the
first one raised, if it came in a destructor."""


class Stopped(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP came. ``exit_status`` follows the shell's rule: 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_status = 128 + number


@dataclass(frozen=True, slots=True)
class Run:
    """One start of the pool, as decided before anything is started."""

    options: Options
    machine: Machine
    model: ModelSource
    folder: Path

    @property
    def router(self) -> RouterPlan:
        policy = self.options.policy
        args = () if policy is None else (router_flag("--policy", policy.value),)
        return RouterPlan(self.options.port, self.folder / "router.log", self.folder / "router.trace", args)


def main(words: Sequence[str]) -> int:
    """The exit status: 0 after the answer with ``--once``, or if stopped while serving; 1 after a failure; 2 for
    options that contradict each other; 129, 130 or 143 if stopped earlier."""
    try:
        options = parse_options(words)
    except ConfigError as error:
        _print_line(str(error))
        return 2
    with _signals_raise():
        try:
            return _check_and_serve(options)
        except BrokenPipeError:  # of stdout, whose reader has enough
            raise
        except NotReady as error:
            _print_line(f"{error}\npdcluster: if it was only slow, give --start-timeout SECONDS more")
            return 1
        except (EngineDied, ZygoteError, ChatError, OSError) as error:
            _print_line(str(error))
            return 1
        except Stopped as stopped:
            _print_line("stopped")
            return stopped.exit_status


def _check_and_serve(options: Options) -> int:
    machine = _machine(options)
    findings = [checks.check_system_libraries(), checks.check_modules(machine.device), checks.check_port(options.port)]
    findings.append(checks.check_device(machine.device))
    findings.append(checks.check_cache(cache_root(os.environ)))
    problems = [*checks.problems_of(findings), *problems_here(options, machine)]
    model = _model_of(options) if not problems else None
    problems += _problems_of(model, options) if model else []
    for problem in problems:
        _print_line(problem)
    if problems or model is None:
        return 1
    for remark in [*remarks(options, machine), *([model.remark] if model.remark else [])]:
        _print_line(remark)
    return _serve(Run(options, machine, model, _make_run_folder(cache_root(os.environ) / "runs")))


def _problems_of(model: ModelSource, options: Options) -> list[str]:
    return [model.problem] if model.problem else split_problems(options, model.read_config())


def _machine(options: Options) -> Machine:
    device = options.device or checks.detect_device()
    num_cores = len(os.sched_getaffinity(0))
    return Machine(device, num_cores, checks.accelerators(device, os.environ), checks.free_bytes())


def _model_of(options: Options) -> ModelSource:
    """The user's model, or else the tiny one, which we make here and which needs no hub."""
    if options.model is not None:
        return find_model(options.model, os.environ)
    _print_line("no --model given: a tiny model that says nothing sensible will do")
    folder = ensure_tiny_model()
    return ModelSource(str(folder), env=OFFLINE, config_file=folder / "config.json")


def _serve(run: Run) -> int:
    wish = INTERNAL_PORT if run.options.port != INTERNAL_PORT else None
    with held_ports(run.options.num_engines + 1, wish=wish) as (internal_port, *engine_ports):
        return _serve_on(run, internal_port, engine_ports)


def _serve_on(run: Run, internal_port: int, engine_ports: Sequence[int]) -> int:
    plans = plan_engines(run.options, run.machine, model=run.model.argument, folder=run.folder, ports=engine_ports)
    _print_line(f"logs are in {run.folder}")
    modules = preload_modules(run.machine.device)
    secrets = secret_env(os.environ)
    env = {**_env(run), **secrets}
    with _zygote(Zygote(modules, env=env, log_path=run.folder / "import.log", scratch=SCRATCH)) as zygote:
        router = dataclasses.replace(run.router, internal_port=internal_port)
        members = start_members(zygote, plans, router, _print_line, timeout_s=run.options.start_timeout_s)
        traces = [run.router.trace_file, *(plan.trace_file for plan in plans if plan.trace_file)]
        prove = partial(prove_transfer, router.internal_port, load_secret(secrets, host=LOOPBACK))
        _ask_first_question(run.options, members, traces, prove)
        if not run.options.is_once:
            _serve_until_stopped(run.options.port, internal_port, members)
        return 0


def _env(run: Run) -> dict[str, str | None]:
    """Environment of the zygote, and so of all other processes, which are its forks."""
    patience = patience_env(os.environ, run.options.start_timeout_s)
    return {**zygote_env(run.machine.device), **patience, **run.model.env}


def _ask_first_question(
    options: Options, members: Sequence[PoolProcess], traces: Sequence[Path], prove: Callable[[], str]
) -> None:
    try:
        model = served_model(options.port, timeout_s=ANSWER_TIMEOUT_S)
        began = time.monotonic()
        proved = prove()
        _print_line(f"a first request went through both engines in {time.monotonic() - began:.2f} s")
        _print_answer(options, model)
    except QuestionRefused as error:
        if options.is_once:
            raise
        print(flush=True)
        _print_line(f"{error}\npdcluster: the pool serves all the same, since KV went through it: {proved}")
        return
    except ChatError as error:
        raise find_dead(members, 2.0, have_served=True) or error from error
    print(_report_text(traces, proved), end="\n\n")
    print(_curl_line(options.port, model), flush=True)


def _print_answer(options: Options, model: str) -> None:
    question = options.question or QUESTION
    print(f"\nQuestion: {_shortened(question)}\nAnswer:   ", end="", flush=True)
    answer = stream_answer(options.port, model, question, max_tokens=MAX_ANSWER_TOKENS, timeout_s=ANSWER_TIMEOUT_S)
    for piece in answer:
        print(piece, end="", flush=True)
    print("\n")


def _serve_until_stopped(port: int, internal_port: int, members: Sequence[PoolProcess]) -> NoReturn:
    _print_line(serving_text(port, internal_port))
    try:
        dead = find_dead(members, None, have_served=True)
    except Stopped as stopped:
        stopped.exit_status = 0
        raise
    assert dead is not None
    raise dead


def serving_text(port: int, internal_port: int) -> str:
    """Says where clients ask, and where people look. ``top`` and ``why`` know the default port by themselves."""
    url = f"http://{LOOPBACK}:{internal_port}"
    flag = "" if internal_port == INTERNAL_PORT else f" --url {url}"
    return (
        f"serving on http://{LOOPBACK}:{port}/v1 until Ctrl-C; "
        f"its state: {url}/status, `pdcluster top{flag}`, `pdcluster why ID{flag}`"
    )


def _report_text(traces: Sequence[Path], proved: str) -> str:
    deadline = time.monotonic() + TRACE_WAIT_S
    request, pushes = _newest_request(traces)
    while not pushes and time.monotonic() < deadline:
        time.sleep(0.05)
        request, pushes = _newest_request(traces)
    report = build_report(request, pushes) if request is not None else None
    if report is None:
        return "No transfer report: the traces hold no finished push for this request"
    return format_report(report, proved)


def _newest_request(traces: Sequence[Path]) -> tuple[RequestTrace | None, list[PushTrace]]:
    lines = read_traces(traces)
    requests = requests_in(lines)
    if len(requests) < 2:  # the first is the proof, not the question
        return None, []
    return requests[-1], pushes_in(lines, requests[-1].transfer_id)


def _curl_line(port: int, model: str) -> str:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32})
    key = f' -H "Authorization: Bearer ${ENGINE_KEY_VARIABLE}"' if os.environ.get(ENGINE_KEY_VARIABLE) else ""
    return f"curl http://127.0.0.1:{port}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {quote(body)}"


def _make_run_folder(runs: Path) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    ended = sorted(folder for folder in runs.iterdir() if folder.is_dir() and not _is_running(folder))
    for old in ended[: -KEPT_RUNS + 1]:
        shutil.rmtree(old, ignore_errors=True)
    folder = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir()
    return folder


def _is_running(folder: Path) -> bool:
    """Whether the process that made the folder still runs: the folder's name ends with its id."""
    return Path("/proc", folder.name.rpartition("-")[2]).exists()


@contextlib.contextmanager
def _zygote(zygote: Zygote) -> Iterator[Zygote]:
    """End the zygote and its engines in any case. Signals cannot interrupt that."""
    try:
        yield zygote
    except Stopped:
        _print_line("stopping")
        raise
    finally:
        try:
            for number in _STOPPING:
                signal.signal(number, signal.SIG_IGN)
        finally:  # also if a signal comes before it is ignored
            zygote.stop()


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    raised_at = -math.inf

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal raised_at
        before, raised_at = raised_at, time.monotonic()
        if raised_at - before > _AGAIN_S:
            raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in _STOPPING if not _is_nohup(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_nohup(number: int) -> bool:
    """Whether ``nohup`` has asked that a closed terminal does not end us."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 120 else f"{line[:70]} [...] {line[-40:]}"


def _print_line(line: str) -> None:
    """Print the line. Where stderr is closed, as behind a closed terminal, the clean-up goes on without it."""
    with contextlib.suppress(OSError):
        print(f"pdcluster: {line}", file=sys.stderr, flush=True)
