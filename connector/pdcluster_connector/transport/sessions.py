"""Transports over one rank's memory, one for each peer, so that a peer can be cut off without the others.

Where a transport costs much, all peers share one: ``shared.py``.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import ClassVar, Final, Protocol

from pdcluster_connector.ending import end_all
from pdcluster_connector.transport.base import Transport
from pdcluster_protocol.errors import ConfigError

_LOG: Final = logging.getLogger("vllm.pdcluster.transport")
_TICK_S: Final = 0.5


class Sessions:
    """Opens sessions on demand. It opens one at engine start, so that a transport that cannot work is found then.

    With Mooncake's TCP a session costs 0.3 ms, two threads and five descriptors (measured with 0.3.13).
    """

    is_shared: ClassVar[bool] = False
    """Whether all sessions are one. While that one is being closed no engine gets another."""

    def __init__(self, make: Callable[[], Transport]) -> None:
        """``make``: a transport with the rank's memory registered.

        Raises:
            ConfigError: ``make`` raised it.
        """
        self._make = make
        self._spares = deque([make()])
        self._is_closed = False

    def open(self) -> Transport:
        """A session for the caller alone, who closes it. Any thread may call this, but it may wait for seconds.

        Raises:
            ConfigError: No further session can be opened, or ``close`` was called.
        """
        self._require_open()
        try:
            return self._spares.popleft()
        except IndexError:
            return self._make()

    def leave(self, session: str) -> None:
        """``session`` is about to be closed: ``open`` does not give it out any more. Never waits."""

    def close(self, deadline: float) -> bool:
        """Closes the session that was opened at start, if it was not given out, and opens none any more.

        Returns whether it is closed. Waits until ``deadline`` (monotonic seconds) for that.
        """
        self._is_closed = True
        spares, self._spares = self._spares, deque()
        return end_all((partial(close_or_end_engine, spare) for spare in spares), deadline)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConfigError("this rank is closing: no session is opened any more")


class Opening:
    """One session that a thread of its own opens. Only its owner calls ``take`` and ``close``."""

    def __init__(self, sessions: Sessions, on_end: Callable[[], None]) -> None:
        """``on_end`` is called, from the other thread, when ``take`` has an answer.

        Raises:
            ConfigError: No thread can be started.
        """
        self._sessions = sessions
        self._on_end = on_end
        self._transport: Transport | None = None
        self._failure = ""
        self._is_unwanted = self._is_left_open = False
        self._outcome_lock = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="pdcluster-session", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ConfigError(f"no session can be opened ({error}): raise the node's limit of processes") from error

    def take(self) -> Transport | None:
        """The session, which the caller closes; None while it is being opened. Never waits.

        Raises:
            ConfigError: It cannot be opened.
        """
        with self._outcome_lock:
            if self._failure:
                raise ConfigError(self._failure)
            transport, self._transport = self._transport, None
            return transport

    def close(self, timeout_s: float, limit_s: float = math.inf) -> bool:
        """Closes the session if it was not taken, now or as soon as it is open. Returns whether it is closed.

        Waits for a session that is open to be closed, as ``close_within`` does, and up to ``timeout_s`` for one that is
        being opened.
        """
        with self._outcome_lock:
            self._is_unwanted = True
            transport, self._transport = self._transport, None
        is_closed = transport is None or close_within(transport, limit_s)
        self._thread.join(timeout_s)
        return is_closed and not self._thread.is_alive() and not self._is_left_open

    def _main(self) -> None:
        try:
            transport = self._sessions.open()
        except Exception as error:  # noqa: BLE001  # top of a thread: whatever the transport's library raises
            _LOG.warning("session not opened", exc_info=True)
            self._failure = f"a transport session cannot be opened: {error}"
        else:
            self._keep(transport)
        self._on_end()

    def _keep(self, transport: Transport) -> None:
        with self._outcome_lock:
            is_unwanted = self._is_unwanted
            if not is_unwanted:
                self._transport = transport
        if is_unwanted:
            self._is_left_open = not close_or_end_engine(transport)


class Closable(Protocol):
    """A transport, or what stands for one."""

    def close(self) -> None:
        """As ``Transport.close``."""


def close_within(transport: Closable, limit_s: float) -> bool:
    """As ``close_or_end_engine``; and if the transport does not close within ``limit_s``, the engine ends meanwhile.

    Seconds are running ones: time for which the process was stopped does not count. With an infinite limit closing may
    take for ever.
    """
    if math.isinf(limit_s):
        return close_or_end_engine(transport)
    is_closed = threading.Event()

    def watch() -> None:
        for _ in range(math.ceil(limit_s / _TICK_S)):
            if is_closed.wait(_TICK_S):
                return
        end_engine(f"a session does not close within {limit_s:g} s")

    with suppress(RuntimeError):  # The process is out of threads: the close is not watched.
        threading.Thread(target=watch, name="pdcluster-close", daemon=True).start()
    try:
        return close_or_end_engine(transport)
    finally:
        is_closed.set()


def close_or_end_engine(transport: Closable) -> bool:
    """Closes a session. Returns whether no memory is written or read by it any more. Waits for the transport.

    A session that cannot be closed ends the engine.
    """
    try:
        transport.close()
    except Exception as error:  # noqa: BLE001  # whatever the transport's library raises
        end_engine("a session cannot be closed", error)
        return False
    return True


def end_engine(why: str, error: Exception | None = None) -> None:
    """Ends this engine by the signal that vLLM takes for a shutdown. ``why``: the session that does not close.

    Memory behind such a session can never be given back: the engine is of no further use.
    """
    _LOG.critical("engine ends, its blocks are not safe reason=%s", why, exc_info=error)
    os.kill(os.getpid(), signal.SIGTERM)
