"""An engine is freed when it is closed and every thread has come out of it, and nobody waits for another."""

from __future__ import annotations

import threading
import time

import pytest

from pdcluster_connector.transport.in_use import InUse

WAIT_S = 30.0


class Inside:
    """A thread that is inside until it is let out."""

    def __init__(self, use: InUse[str]) -> None:
        self._out, self._is_in = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._stay, args=(use,))
        self._thread.start()
        assert self._is_in.wait(WAIT_S)

    def _stay(self, use: InUse[str]) -> None:
        with use.enter():
            self._is_in.set()
            assert self._out.wait(WAIT_S)

    def leave(self) -> None:
        self._out.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def test_an_engine_without_users_is_freed_at_once_and_once() -> None:
    freed: list[str] = []
    use = InUse("engine", freed.append)
    with use.enter() as engine:
        assert engine == "engine"
    assert use.close(0.0)
    assert use.close(0.0)
    assert freed == ["engine"]
    with use.enter() as engine:
        assert engine is None


def test_others_enter_while_a_thread_stays_inside() -> None:
    use = InUse("engine", lambda _: None)
    inside = Inside(use)
    with use.enter() as engine:
        assert engine == "engine"
    inside.leave()


def test_a_thread_that_stays_inside_frees_a_closed_engine_when_it_comes_out() -> None:
    freed: list[str] = []
    use = InUse("engine", freed.append)
    inside = [Inside(use), Inside(use)]
    assert not use.close(0.01)
    assert not use.is_open
    inside[0].leave()
    assert freed == []
    inside[1].leave()
    assert freed == ["engine"]
    assert use.close(0.0)


def test_closing_waits_for_those_inside() -> None:
    freed: list[str] = []
    use = InUse("engine", freed.append)
    inside = Inside(use)
    timer = threading.Timer(0.05, inside.leave)
    timer.start()
    assert use.close(WAIT_S)
    assert freed == ["engine"]
    timer.join()


def test_closing_that_says_the_engine_is_freed_has_seen_the_end_of_that() -> None:
    """Mooncake takes most of a second to end its writes: until then they read our memory."""
    freed: list[str] = []

    def free(engine: str) -> None:
        time.sleep(0.1)
        freed.append(engine)

    use = InUse("engine", free)
    inside = Inside(use)
    timer = threading.Timer(0.05, inside.leave)
    timer.start()
    assert use.close(WAIT_S)
    assert freed == ["engine"]
    timer.join()


def test_an_engine_is_not_called_freed_while_it_is_being_freed() -> None:
    """A write that is called over by then may still be read: Mooncake takes most of a second."""
    told: list[bool] = []
    use: InUse[str] = InUse("engine", lambda _: told.append(use.is_freed))
    assert use.close(0.0)
    assert (told, use.is_freed) == ([False], True)


def test_an_error_inside_leaves_too() -> None:
    freed: list[str] = []
    use = InUse("engine", freed.append)
    with pytest.raises(ValueError, match="why"), use.enter():
        raise ValueError("why")
    assert use.close(0.0)
    assert freed == ["engine"]
