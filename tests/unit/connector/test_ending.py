"""Parts end side by side and by one deadline, whatever blocks, and what has not ended keeps its memory."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from patience import PATIENCE_S
from pdcluster_connector import ending
from pdcluster_connector.ending import END_S, EndingThread, end_all, end_parts
from pdcluster_connector.settings import CUT_S

PASSED = 0.0
"""A deadline that has passed."""


def soon() -> float:
    """A deadline that does not pass in a test."""
    return time.monotonic() + PATIENCE_S


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opens at the end."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    ending._kept.clear()


def test_what_ends_is_waited_for_and_what_says_that_it_has_not_ended_is_not_called_ended() -> None:
    assert end_all([lambda: True, lambda: True], soon())
    assert not end_all([lambda: False, lambda: True], soon())


def test_an_end_that_raises_is_not_called_ended_and_the_others_end(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()

    def fail() -> bool:
        raise RuntimeError("the library gave up")

    def end() -> bool:
        ended.set()
        return True

    assert not end_all([fail, end], soon())
    assert ended.is_set()
    assert "the library gave up" in caplog.text


def test_all_end_side_by_side() -> None:
    """One after the other none of them would end."""
    meeting = threading.Barrier(16)
    assert end_all([lambda: meeting.wait(PATIENCE_S) >= 0] * 16, soon())


def test_nothing_is_waited_for_beyond_the_deadline_and_it_ends_later(gate: threading.Event) -> None:
    one = EndingThread(lambda: gate.wait(PATIENCE_S))
    assert not one.wait(PASSED)
    gate.set()
    assert one.wait(soon())


def test_where_no_thread_can_be_started_the_caller_ends_each_thing_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in exit handlers of Python 3.12.1, where vLLM without multiprocessing ends its engine."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    parts = [Fake(lambda: True), Fake(lambda: False), Fake(lambda: True)]
    end_parts(parts)
    assert all(part.deadline for part in parts)
    assert ending._kept == [parts[1]]


class Fake:
    """A part with memory, whose end does as it is told."""

    def __init__(self, end: Callable[[], bool]) -> None:
        self.deadline = 0.0
        self._end = end

    def close(self, deadline: float) -> bool:
        self.deadline = deadline
        return self._end()


def test_a_part_that_blocks_keeps_no_other_from_its_end_and_all_have_one_deadline(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    has_begun, has_ended = threading.Event(), threading.Event()

    def block() -> bool:
        has_begun.set()
        return gate.wait(PATIENCE_S)

    def end() -> bool:
        has_ended.set()
        return has_begun.wait(PATIENCE_S)

    blocked, other = Fake(block), Fake(end)
    end_parts([blocked, other], within_s=0.01)
    assert has_begun.wait(PATIENCE_S)
    assert has_ended.wait(PATIENCE_S)
    assert not gate.is_set()
    assert blocked.deadline == other.deadline
    assert blocked in ending._kept
    assert [it.levelno for it in caplog.records] == [logging.CRITICAL]
    assert "parts=Fake waited_s=0.01" in caplog.text


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """Also where this process was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_memory_is_kept_if_a_signal_interrupts_the_wait(gate: threading.Event) -> None:
    """A user at a prompt ends an engine, and loses patience."""

    def interrupt() -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return gate.wait(PATIENCE_S)

    part = Fake(interrupt)
    with pytest.raises(KeyboardInterrupt):
        end_parts([part])
    assert ending._kept == [part]


@pytest.mark.parametrize("has_ended", [True, False])
def test_memory_of_a_part_is_given_back_only_if_it_has_ended(*, has_ended: bool) -> None:
    """vLLM lets go of the KV cache as soon as this returns, and its process may go on."""
    part = Fake(lambda: has_ended)
    memory = weakref.ref(part)
    end_parts([part])
    del part
    gc.collect()
    assert (memory() is None) is has_ended


def test_the_seconds_of_an_end_are_five_for_pushes_and_two_cuts() -> None:
    """The operations page says so; a lane's cut and unused sessions have one each."""
    assert END_S == 5 + 2 * CUT_S
