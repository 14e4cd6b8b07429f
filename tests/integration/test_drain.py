"""An engine's preStop against an engine that works, idles, hangs or dies; and a real one."""

from __future__ import annotations

import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from fakes.vllm_server import VllmPages, serving
from integration.harness import Harness, complete, eventually, metric
from integration.ports import fresh_port
from patience import PATIENCE_S
from pdcluster_cli.__main__ import main
from pdcluster_cli.pod.drain import wait_until_idle
from pdcluster_cli.pod.engine_http import Answer, NoAnswer

IDLE_S = 0.6
LONG_S = 60.0
"""Whoever waits for all of it takes twice what a test allows."""


def drain(port: int, timeout_s: float = LONG_S, idle_s: float = IDLE_S) -> tuple[int, float]:
    """Exit status and seconds. In a thread: one that never ends fails its test, and does not stop the others."""
    began_at, ended = time.monotonic(), list[int]()
    words = ["drain", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--timeout-s", str(timeout_s), "--idle-s", str(idle_s)]
    thread = threading.Thread(target=lambda: ended.append(main(words)), daemon=True)
    thread.start()
    thread.join(timeout_s + 10)
    assert not thread.is_alive(), f"the drain has not ended {timeout_s + 10:g} s after its beginning"
    return ended[0], time.monotonic() - began_at


@dataclass
class Story(VllmPages):
    """An engine that changes when it has been asked for its metrics ``num_looks`` times and is asked again."""

    num_looks: int = 1
    then: dict[str, float] = field(default_factory=dict)
    changed_at: float = math.inf

    def metrics(self) -> str:
        if self.asked.count("/metrics") > self.num_looks and self.changed_at == math.inf:
            self.changed_at = time.monotonic()
            for name, value in self.then.items():
                setattr(self, name, value)
        return super().metrics()


def test_an_idle_engine_is_let_go_when_a_router_has_had_time_to_notice(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(VllmPages()) as pages:
        status, seconds = drain(pages.port)
    assert status == 0
    assert IDLE_S <= seconds < LONG_S / 2
    assert len(pages.asked) <= 2 * 6, "looked on"
    assert capsys.readouterr().out.startswith("pdcluster drain: idle for 0.6 s after ")


@pytest.mark.parametrize("work", [{"running": 1}, {"waiting": 2}, {"kv_share": 0.001}])
def test_work_of_any_kind_is_waited_for(work: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    pages = Story(num_looks=4, then=dict.fromkeys(work, 0))
    for name, value in work.items():
        setattr(pages, name, value)
    with serving(pages):
        status, seconds = drain(pages.port)
        idle_s = time.monotonic() - pages.changed_at
    assert status == 0
    assert IDLE_S <= idle_s <= seconds < LONG_S / 2
    assert ": idle for " in capsys.readouterr().out


def test_a_request_that_came_and_went_unseen_begins_the_wait_anew() -> None:
    pages = Story(num_looks=1, then={"ended": 1})
    with serving(pages):
        drain(pages.port)
        idle_s = time.monotonic() - pages.changed_at
    assert idle_s >= IDLE_S


def test_what_does_not_end_is_given_up_when_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(VllmPages(running=3, waiting=1, kv_share=0.25)) as pages:
        status, seconds = drain(pages.port, timeout_s=1.0)
    assert status == 0
    assert 1.0 <= seconds < LONG_S / 2
    held = "3 running, 1 waiting, 25.00% of KV memory held"
    assert re.search(rf": gave up after \d+\.\d s: {held}\n$", capsys.readouterr().out)


def test_an_engine_that_does_not_answer_gets_all_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(VllmPages(is_stopped=True)) as pages:
        status, seconds = drain(pages.port, timeout_s=1.0)
    assert status == 0
    assert 1.0 <= seconds < LONG_S / 2
    line = capsys.readouterr().out
    assert ": gave up after " in line, "what says nothing may still work"
    assert "/health does not answer: timed out" in line


def test_an_engine_that_says_nothing_of_requests_gets_all_the_time() -> None:
    pages = VllmPages(has_gauges=False)

    def ask(path: str, timeout_s: float) -> Answer:
        return Answer(200, "" if path == "/health" else pages.metrics())

    begin = time.monotonic()
    told = wait_until_idle(ask, timeout_s=0.5, idle_s=0.1)
    assert time.monotonic() - begin >= 0.5
    assert told.startswith("gave up after ")
    assert "say nothing of requests" in told


def test_an_engine_that_stalls_for_a_question_is_waited_for_when_it_speaks_again() -> None:
    pages = VllmPages(running=1)
    asked: list[str] = []

    def ask(path: str, timeout_s: float) -> Answer:
        asked.append(path)
        if len(asked) <= 2:
            raise NoAnswer(f"{path} does not answer in {timeout_s:g} s")
        pages.running = int(len(asked) <= 4)
        return Answer(200, "" if path == "/health" else pages.metrics())

    assert wait_until_idle(ask, timeout_s=PATIENCE_S, idle_s=0.1).startswith("idle for 0.1 s after ")
    assert len(asked) > 4


def test_the_look_that_begins_when_time_is_over_gives_the_engine_time_to_answer() -> None:
    def ask(path: str, timeout_s: float) -> Answer:
        if timeout_s < 0.1:
            raise NoAnswer(f"{path} does not answer in {timeout_s:g} s")
        return Answer(200, "" if path == "/health" else VllmPages(running=1).metrics())

    said = wait_until_idle(ask, timeout_s=0, idle_s=IDLE_S)
    assert said.endswith(": 1 running, 0 waiting, 0.00% of KV memory held")


@pytest.mark.parametrize("is_late", [False, True])
def test_an_engine_that_has_died_is_not_waited_for(is_late: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Story(running=1, health=200 if is_late else 503, num_looks=2, then={"health": 503})) as pages:
        status, seconds = drain(pages.port)
    assert status == 0
    assert seconds < LONG_S / 2
    assert pages.asked.count("/metrics") == (3 if is_late else 0)
    assert "the engine is gone" in capsys.readouterr().out


def test_where_nobody_listens_there_is_nothing_to_wait_for(capsys: pytest.CaptureFixture[str]) -> None:
    status, seconds = drain(fresh_port())
    assert status == 0
    assert seconds < LONG_S / 2
    assert re.search(r"the engine is gone after \d+\.\d s: no process listens", capsys.readouterr().out)


@pytest.mark.engines
def test_a_real_engine_is_drained_when_its_last_request_has_ended(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    with harness.single_engine() as engine, ThreadPoolExecutor(1) as client:
        answer = client.submit(complete, engine.url, "Tell me a story", 600, ignore_eos=True)
        assert eventually(lambda: metric(engine.url, "vllm:num_requests_running") == 1)
        status, seconds = drain(engine.port, timeout_s=200, idle_s=5.0)
        assert answer.done(), "the preStop ended before the request did"
        assert len(answer.result().token_ids) == 600
        assert seconds < 180
    assert status == 0
    assert "idle for 5 s" in capsys.readouterr().out
    assert drain(engine.port)[0] == 0
    assert "the engine is gone" in capsys.readouterr().out
