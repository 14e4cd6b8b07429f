"""The sessions by which prefill engines write into one decode rank: one for each life of a prefill engine.

Closing one is the hard fence: no byte of that engine can land any more, and no other engine notices. It takes
Mooncake 0.8 s (measured with 0.3.13), so a short-lived thread does it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from pdcluster_connector.core.receiving import SessionId
from pdcluster_connector.transport.base import Transport
from pdcluster_connector.transport.sessions import Sessions, close_or_end_engine
from pdcluster_protocol.ids import BootId


class InboundSessions:
    """Receiver thread only, but for ``close``."""

    def __init__(self, sessions: Sessions, on_closed: Callable[[], None]) -> None:
        """``on_closed`` is called, from another thread, when ``take_closed`` has something to give."""
        self._sessions = sessions
        self._on_closed = on_closed
        self._open: dict[BootId, Transport] = {}
        self._closed: deque[SessionId] = deque()
        self._cutters: list[threading.Thread] = []

    def open(self, boot_id: BootId) -> SessionId:
        """The session of this life of a prefill engine, for all of its ranks.

        Raises:
            ConfigError: No further session can be opened.
        """
        transport = self._open.get(boot_id)
        if transport is None:
            transport = self._open[boot_id] = self._sessions.open()
        return SessionId(transport.session)

    def cut(self, session: SessionId) -> None:
        """Begin to close ``session``; ``take_closed`` gives it when nothing can land by it any more."""
        for boot_id, transport in self._open.items():
            if transport.session == session:
                del self._open[boot_id]
                self._start_closing(session, transport)
                return

    def take_closed(self) -> list[SessionId]:
        """Sessions whose closing has ended since the last call."""
        self._cutters = [thread for thread in self._cutters if thread.is_alive()]
        closed = []
        while self._closed:
            closed.append(self._closed.popleft())
        return closed

    def close(self) -> None:
        """Close all of them, side by side. After the receiver thread has ended. Waits up to 2 s."""
        for transport in self._open.values():
            self._start_closing(SessionId(transport.session), transport)
        self._open.clear()
        for thread in self._cutters:
            thread.join(2.0)
        self._sessions.close()

    def _start_closing(self, session: SessionId, transport: Transport) -> None:
        thread = threading.Thread(target=self._close, args=(session, transport), name="pdcluster-cut", daemon=True)
        self._cutters.append(thread)
        thread.start()

    def _close(self, session: SessionId, transport: Transport) -> None:
        if close_or_end_engine(transport):
            self._closed.append(session)
            self._on_closed()
