"""What a start of the pool is made of: the router's command line, and the folders of earlier starts."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdcluster_cli.local.command import (
    KEPT_RUNS,
    Run,
    Stopped,
    _curl_line,
    _make_run_folder,
    _signals_raise,
    _zygote,
    serving_text,
)
from pdcluster_cli.local.options import parse_options
from pdcluster_cli.local.plan import Machine, plan_engines
from pdcluster_cli.local.pool import router_spec
from pdcluster_cli.models.model_source import ModelSource
from pdcluster_cli.processes.engines import LocalDevice
from pdcluster_cli.processes.zygote import Zygote
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
    run = Run(parse_options(words), Machine(LocalDevice.CPU, 8), ModelSource("m"), folder)
    plans = plan_engines(run.options, run.machine, model="m", folder=folder, ports=[8100, 8200])
    return parse_settings(router_spec(plans, run.router).argv).policy


def test_where_to_look_at_the_pool_is_said_with_the_url_where_top_and_why_do_not_know_it() -> None:
    assert serving_text(8000, 8001) == (
        "serving on http://127.0.0.1:8000/v1 until Ctrl-C; "
        "its state: http://127.0.0.1:8001/status, `pdcluster top`, `pdcluster why ID`"
    )
    assert "`pdcluster why ID --url http://127.0.0.1:4321`" in serving_text(8000, 4321)


class NoZygote(Zygote):
    """Starts no process, and counts its stops."""

    def __init__(self) -> None:
        self.num_stops = 0

    def stop(self, grace_s: float = 5.0) -> None:
        self.num_stops += 1


@contextmanager
def handler_of_hangups(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_that_ends_a_command_stops_the_zygote(number: signal.Signals) -> None:
    zygote = NoZygote()
    with handler_of_hangups(signal.SIG_DFL), pytest.raises(Stopped) as stopped, _signals_raise(), _zygote(zygote):
        signal.raise_signal(number)
    assert (zygote.num_stops, stopped.value.exit_status) == (1, 128 + number)


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    zygote = NoZygote()
    with handler_of_hangups(signal.SIG_IGN), _signals_raise(), _zygote(zygote):
        signal.raise_signal(signal.SIGHUP)
        assert zygote.num_stops == 0


def test_a_signal_that_comes_as_the_clean_up_begins_does_not_prevent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    zygote, real = NoZygote(), signal.signal

    def late(number: int, handler: Any) -> Any:
        before = real(number, handler)
        if handler is signal.SIG_IGN and number == signal.SIGINT:
            signal.raise_signal(signal.SIGTERM)
        return before

    with pytest.raises(Stopped), _signals_raise(), _zygote(zygote):
        monkeypatch.setattr(signal, "signal", late)
    assert zygote.num_stops == 1


def test_a_second_signal_is_ignored() -> None:
    with pytest.raises(Stopped) as stopped, _signals_raise(), after_all(signal.SIGINT):
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.exit_status == 128 + signal.SIGTERM


def test_a_signal_counts_though_python_has_dropped_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it raised, for one in a destructor."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with _signals_raise():
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # The same moment: it is part of the first.
        now = 101.1
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(signal.SIGTERM)
    assert stopped.value.exit_status == 128 + signal.SIGTERM


@contextmanager
def after_all(number: signal.Signals) -> Iterator[None]:
    """The signal comes while the clean-up runs."""
    try:
        yield
    finally:
        signal.raise_signal(number)


def test_the_printed_curl_line_is_right_for_each_name_of_a_model() -> None:
    for name in ("ORG/model", 'it\'s a "model"', "$HOME `id` \\"):
        body = shlex.split(_curl_line(8000, name))[-1]
        assert json.loads(body)["model"] == name
