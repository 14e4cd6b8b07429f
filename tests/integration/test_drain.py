"""An engine's preStop against an engine that works, idles, hangs or dies; and a real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fakes.vllm_server import VllmPages, serving
from integration.harness import Harness, complete
from integration.ports import fresh_port
from pdcluster_cli.__main__ import main
from pdcluster_cli.drain import wait_until_idle
from pdcluster_cli.engine_http import Answer, NoAnswer

IDLE_S = 0.6


def drain(port: int, timeout_s: float = 10.0, idle_s: float = IDLE_S) -> tuple[int, float]:
    """Exit status and seconds. In a thread: one that never ends fails its test, and does not stop the others."""
    began_at, ended = time.monotonic(), list[int]()
    words = ["drain", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--timeout-s", str(timeout_s), "--idle-s", str(idle_s)]
    thread = threading.Thread(target=lambda: ended.append(main(words)), daemon=True)
    thread.start()
    thread.join(timeout_s + 10)
    assert not thread.is_alive(), f"the drain has not ended {timeout_s + 10:g} s after its beginning"
    return ended[0], time.monotonic() - began_at


def after(seconds: float, change: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, change)
    timer.start()
    return timer


def test_an_idle_engine_is_let_go_when_a_router_has_had_time_to_notice(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(VllmPages()) as pages:
        status, seconds = drain(pages.port)
    assert status == 0
    assert IDLE_S <= seconds < 3
    assert capsys.readouterr().out.startswith("pdcluster drain: idle for 0.6 s after ")


@pytest.mark.parametrize("work", [{"running": 1}, {"waiting": 2}, {"kv_share": 0.001}])
def test_work_of_any_kind_is_waited_for(work: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    with serving(VllmPages()) as pages:
        ((name, value),) = work.items()
        setattr(pages, name, value)
        timer = after(1.0, lambda: setattr(pages, name, 0))
        status, seconds = drain(pages.port)
        timer.join()
    assert status == 0
    assert 1.0 + IDLE_S <= seconds < 4
    assert ": idle for " in capsys.readouterr().out


def test_a_request_that_came_and_went_unseen_begins_the_wait_anew() -> None:
    with serving(VllmPages()) as pages:
        timer = after(IDLE_S / 2, lambda: setattr(pages, "ended", 1))
        _, seconds = drain(pages.port)
        timer.join()
    assert seconds >= 1.5 * IDLE_S


def test_what_does_not_end_is_given_up_when_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(VllmPages(running=3, waiting=1, kv_share=0.25)) as pages:
        status, seconds = drain(pages.port, timeout_s=1.0)
    assert status == 0
    assert 1.0 <= seconds < 3
    line = capsys.readouterr().out
    assert ": gave up after 1." in line
    assert line.endswith(": 3 running, 1 waiting, 25.00% of KV memory held\n")


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"is_stopped": True}, "/health does not answer: timed out"), ({"has_gauges": False}, "say nothing of requests")],
)
def test_an_engine_that_says_nothing_gets_all_the_time(
    changes: dict[str, bool], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(VllmPages()) as pages:
        for name, value in changes.items():
            setattr(pages, name, value)
        status, seconds = drain(pages.port, timeout_s=1.0)
    assert status == 0
    assert 1.0 <= seconds < 4
    line = capsys.readouterr().out
    assert ": gave up after " in line, "what says nothing may still work"
    assert why in line


def test_an_engine_that_stalls_for_a_question_is_waited_for_when_it_speaks_again() -> None:
    pages = VllmPages(running=1)
    asked: list[str] = []

    def ask(path: str, timeout_s: float) -> Answer:
        asked.append(path)
        if len(asked) <= 2:
            raise NoAnswer(f"{path} does not answer in {timeout_s:g} s")
        pages.running = int(len(asked) <= 4)
        return Answer(200, "" if path == "/health" else pages.metrics())

    assert wait_until_idle(ask, timeout_s=30, idle_s=0.1).startswith("idle for 0.1 s after ")
    assert len(asked) > 4


@pytest.mark.parametrize("is_late", [False, True])
def test_an_engine_that_has_died_is_not_waited_for(is_late: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(VllmPages(running=1, health=200 if is_late else 503)) as pages:
        timer = after(0.5, lambda: setattr(pages, "health", 503))
        status, seconds = drain(pages.port)
        timer.join()
    assert status == 0
    assert seconds < 3
    assert "the engine is gone" in capsys.readouterr().out


def test_where_nobody_listens_there_is_nothing_to_wait_for(capsys: pytest.CaptureFixture[str]) -> None:
    status, seconds = drain(fresh_port())
    assert status == 0
    assert seconds < 1
    assert "the engine is gone after 0.0 s: nobody listens" in capsys.readouterr().out


@pytest.mark.engines
def test_a_real_engine_is_drained_when_its_last_request_has_ended(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    with harness.single_engine() as engine, ThreadPoolExecutor(1) as client:
        began_at = time.monotonic()
        answer = client.submit(complete, engine.url, "Tell me a story", 600, ignore_eos=True)
        time.sleep(0.3)
        status, _ = drain(engine.port, timeout_s=60, idle_s=1.0)
        assert answer.done(), "the preStop ended before the request did"
        assert len(answer.result().token_ids) == 600
        assert time.monotonic() - began_at < 60
    assert status == 0
    assert "idle for 1 s" in capsys.readouterr().out
    assert drain(engine.port)[0] == 0
    assert "the engine is gone" in capsys.readouterr().out
