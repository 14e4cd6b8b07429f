"""What a start says while it goes on, and how long each process gets."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from pathlib import Path
from threading import Thread

import pytest

from pdcluster_cli.local.pool import RouterPlan, _await_zygote, start_members
from pdcluster_cli.processes.engines import EnginePlan, PoolRole
from pdcluster_cli.processes.zygote import EngineHandle, EngineSpec, Ready, Zygote


class SlowImport(Zygote):
    """Has imported at the second question; the first one is answered after ``news_s`` seconds."""

    def __init__(self, news_s: float) -> None:
        self.log_path = Path("import.log")
        self._answers = iter([None, Ready(import_s=news_s, num_threads=1)])
        self._news_s = news_s

    def wait_ready(self, timeout_s: float | None) -> Ready | None:
        time.sleep(self._news_s)
        return next(self._answers)


def test_an_import_that_goes_on_says_for_how_many_seconds_it_has() -> None:
    said: list[str] = []
    _await_zygote(SlowImport(0.6), said.append, 3600.0)
    begin, news, end = said
    assert (begin, end) == ("importing vLLM once, for all engines", "imported in 0.6 s")
    (seconds,) = re.findall(r"^still importing \((\d+) s\)$", news)
    assert int(seconds) >= 1


class PlayedTime:
    """A clock that stands still between two steps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class EndlessImport(SlowImport):
    """Never has imported, and notes for how long it is waited for."""

    def __init__(self, time: PlayedTime) -> None:
        super().__init__(0.0)
        self.waited: list[float | None] = []
        self._time = time

    def wait_ready(self, timeout_s: float | None) -> Ready | None:
        self.waited.append(timeout_s)
        self._time.now += min(0.05, timeout_s or 0.0)
        return None


def test_an_import_is_not_waited_for_longer_than_the_start_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedTime()
    zygote = EndlessImport(played)
    monkeypatch.setattr(time, "monotonic", played.monotonic)
    with pytest.raises(TimeoutError, match=r"importing vLLM takes more than 0 s \(--start-timeout\): see import\.log"):
        _await_zygote(zygote, lambda _: None, 0.12)
    asked = [seconds for seconds in zygote.waited if seconds is not None]
    assert asked == sorted(asked, reverse=True)
    assert asked[-1] < 0.12 / 2


def test_where_nothing_is_imported_once_the_process_that_starts_engines_has_no_longer_either() -> None:
    said: list[str] = []
    zygote = EndlessImport(PlayedTime())
    zygote.imports_once = False
    with pytest.raises(TimeoutError, match=r"the start of the process that starts engines takes more than 0 s"):
        _await_zygote(zygote, said.append, 0.0)
    assert said == []


def test_where_every_engine_imports_for_itself_nothing_is_said_of_one_import(tmp_path: Path) -> None:
    log = tmp_path / "import.log"
    with Zygote([], env={}, log_path=log) as without, Zygote(["json"], env={}, log_path=log) as with_one:
        assert (without.imports_once, with_one.imports_once) == (False, True)


class LastingZygote(Zygote):
    """Has imported. Its engines never end: this very process stands for each of them."""

    def __init__(self) -> None:
        """It starts no process."""

    def wait_ready(self, timeout_s: float | None) -> Ready | None:
        return Ready(import_s=0.0, num_threads=1)

    def start_engine(self, spec: EngineSpec) -> EngineHandle:
        return EngineHandle(spec, os.getpid(), os.pidfd_open(os.getpid()))


@contextmanager
def answering(statuses: Iterable[int]) -> Iterator[int]:
    """The port of a server that answers its questions with these."""
    coming = iter(statuses)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(next(coming))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), name="answering")
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_the_router_gets_its_own_time_when_the_engines_have_used_up_theirs(tmp_path: Path) -> None:
    with answering(repeat(200)) as engine, answering(chain([503, 503], repeat(200))) as front:
        plan = EnginePlan("prefill-0", PoolRole.PREFILL, "m", engine, tmp_path / "prefill.log")
        router = RouterPlan(front, tmp_path / "router.log", tmp_path / "trace.jsonl")
        members = start_members(LastingZygote(), [plan], router, lambda _: None, timeout_s=0.0)
    assert [member.name for member in members] == ["prefill-0", "router"]
    for member in members:
        member.handle.close()
