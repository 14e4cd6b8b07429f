"""The sessions by which prefill engines write into one decode rank: one for each life of a prefill engine.

Closing a session is the hard fence: no byte of its engine can land any more. Other engines do not notice, unless they
share the session (``transport/shared.py``). Closing takes Mooncake 0.8 s (measured with 0.3.13), and opening takes
seconds with RDMA, so short-lived threads do both.

    asked for --> opening --> open, or failed: told to each peer that asked meanwhile --> cut --> closed, or too late:
                                                                                                 the engine ends
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final

from pdcluster_connector.core.writers import PeerId, SessionId
from pdcluster_connector.ending import EndingThread, have_ended
from pdcluster_connector.transport.base import Transport
from pdcluster_connector.transport.sessions import Opening, Sessions, close_or_end_engine, end_engine
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import BootId

OPEN_S: Final = 60.0
"""How long a peer waits here for its session. Mostly prefill's shorter ``handshake_timeout_s`` ends the wait first; a
session that opens later serves the next request."""

MAX_OPENINGS: Final = 64
"""The most sessions that are opened at once, each by a thread. Fewer prefill engines than this begin at once."""

MAX_GUESTS: Final = 1024
"""The most peers of one engine that may wait for its session: enough for its ranks with some lanes each."""

_NOW: Final = 0.0
"""A deadline that has passed: nothing is waited for."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The wait of ``peers`` has ended, with a session or with the reason why there is none."""

    peers: tuple[PeerId, ...]
    session: SessionId | None = None
    reason: str = ""


@dataclass(slots=True)
class _Arrival:
    """An engine whose session is being opened."""

    opening: Opening
    guests: dict[PeerId, float] = field(default_factory=dict)
    """The peers that wait, and until when (running seconds)."""

    def take_late(self, now: float) -> tuple[PeerId, ...]:
        """The peers that have waited long enough."""
        late = tuple(peer for peer, until in self.guests.items() if now >= until)
        for peer in late:
            del self.guests[peer]
        return late


@dataclass(slots=True)
class _Cutter:
    """A session that is being closed, and until when (running seconds) it must be closed."""

    session: SessionId
    thread: EndingThread
    close_by: float


class InboundSessions:
    """The inbound sessions of one decode rank. Receiver thread only, except ``close``."""

    def __init__(self, sessions: Sessions, on_news: Callable[[], None]) -> None:
        """``on_news`` is called, from another thread, when ``take_opened`` or ``take_closed`` has something to give."""
        self._sessions = sessions
        self._on_news = on_news
        self._open: dict[BootId, Transport] = {}
        self._arrivals: dict[BootId, _Arrival] = {}
        self._closed: deque[SessionId] = deque()
        self._cutters: list[_Cutter] = []
        """Those that have not closed their session, perhaps because it cannot be closed."""

    @property
    def is_shared(self) -> bool:
        """Whether all engines have one session: they wait while it is being closed."""
        return self._sessions.is_shared

    def open(self, boot_id: BootId, peer: PeerId, *, now: float) -> SessionId | None:
        """The session of this life of a prefill engine, for all of its ranks; None: ``take_opened`` will name ``peer``.

        Never waits.

        Raises:
            ConfigError: Too many engines, or too many peers of this engine, wait for sessions already, or no thread can
                be started.
        """
        if transport := self._open.get(boot_id):
            return SessionId(transport.session)
        arrival = self._arrivals.get(boot_id)
        if arrival is None:
            if len(self._arrivals) >= MAX_OPENINGS:
                raise ConfigError(f"decode opens sessions for {MAX_OPENINGS} other prefill engines just now: try again")
            arrival = self._arrivals[boot_id] = _Arrival(Opening(self._sessions, self._on_news))
        if len(arrival.guests) >= MAX_GUESTS:
            raise ConfigError(f"{MAX_GUESTS} connections of this prefill engine wait for their session: try again")
        arrival.guests[peer] = now + OPEN_S
        return None

    def take_opened(self, *, now: float) -> list[Opened]:
        """The peers whose wait for a session has ended since the last call, and each session that has opened: also one
        for which no peer waits any more."""
        ended = []
        for boot_id, arrival in list(self._arrivals.items()):
            looked, late = self._look(boot_id, arrival), self._turn_away(arrival, now)
            ended += [one for one in (looked, late) if one.peers or one.session is not None]
        return ended

    def cut(self, session: SessionId, *, close_by: float) -> None:
        """Begins to close ``session``; ``take_closed`` returns it once no byte can land through it.

        If engines share the session, all of them need another one. ``close_by``: running seconds; one that closes later
        ends this engine.
        """
        self._sessions.leave(session)
        cut = [boot_id for boot_id, transport in self._open.items() if transport.session == session]
        users = [self._open.pop(boot_id) for boot_id in cut]
        if users:
            self._start_closing(session, users[0], close_by)

    def take_closed(self, *, now: float) -> list[SessionId]:
        """Sessions whose closing has ended since the last call. Ends this engine if one is too late."""
        self._cutters = [cutter for cutter in self._cutters if not cutter.thread.wait(_NOW)]
        for late in (cutter for cutter in self._cutters if now >= cutter.close_by and cutter.thread.is_at_it):
            late.close_by = inf
            end_engine(f"session {late.session} does not close")
        closed = []
        while self._closed:
            closed.append(self._closed.popleft())
        return closed

    def close(self, deadline: float) -> bool:
        """Closes all sessions, side by side. To be called after the receiver thread has ended.

        Returns whether no byte can land through any of them. Waits until ``deadline`` (monotonic seconds) for that.
        """
        opened, self._open = self._open, {}
        for transport in opened.values():
            self._start_closing(SessionId(transport.session), transport, inf)
        arrivals, self._arrivals = self._arrivals, {}
        endings = [EndingThread(partial(arrival.opening.close, OPEN_S)) for arrival in arrivals.values()]
        are_closed = self._sessions.close(deadline)
        return have_ended([*endings, *(cutter.thread for cutter in self._cutters)], deadline) and are_closed

    def _look(self, boot_id: BootId, arrival: _Arrival) -> Opened:
        peers = tuple(arrival.guests)
        try:
            transport = arrival.opening.take()
        except ConfigError as error:
            del self._arrivals[boot_id]
            return Opened(peers, reason=f"decode: {error}")
        if transport is None:
            return Opened(())
        del self._arrivals[boot_id]
        if not transport.is_open:
            return Opened(peers, reason="decode has closed the session that its peers share: try again")
        self._open[boot_id] = transport
        return Opened(peers, SessionId(transport.session))

    def _turn_away(self, arrival: _Arrival, now: float) -> Opened:
        return Opened(arrival.take_late(now), reason=f"decode could not open a session within {OPEN_S:g} s")

    def _start_closing(self, session: SessionId, transport: Transport, close_by: float) -> None:
        thread = EndingThread(partial(self._close, session, transport), "pdcluster-cut")
        self._cutters.append(_Cutter(session, thread, close_by))

    def _close(self, session: SessionId, transport: Transport) -> bool:
        if not close_or_end_engine(transport):
            return False
        self._closed.append(session)
        self._on_news()
        return True
