"""Keeps the first writes to each peer until the peer has answered, so that no lane waits for it.

Mooncake 0.3.13 opens a peer at the first write to it, under one lock for all peers, and waits there up to 60 s
for a peer that is stopped (measured): every lane would stand still. A probe takes no such lock, so a short-lived
thread probes first, and writes go to Mooncake only when the peer has answered.

    defer --> probing --answered--> deliver its writes --> open
                 |
                 +-- no answer --> refuse its writes, forget the peer (the next write probes again)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pdcluster_connector.transport.base import WriteId, WriteRange
from pdcluster_protocol.errors import TransferError

_LOG: Final = logging.getLogger("vllm.pdcluster.transport")
_THREAD_NAME: Final = "pdcluster-open"


@dataclass(frozen=True, slots=True)
class Write:
    """One submit, which waits here until its peer has answered."""

    id: WriteId
    session: str
    ranges: Sequence[WriteRange]


@dataclass(frozen=True, slots=True)
class Backend:
    """Actions on a peer and its writes. Only the probing thread calls ``probe``, which may wait. Any thread may call
    the others, which never wait."""

    probe: Callable[[str], bool]
    deliver: Callable[[Write], None]
    refuse: Callable[[Write], None]


class Openings:
    """Knows which peers are open. Lane threads call ``is_open`` and ``defer``; neither waits for a peer."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._opening_lock = threading.Lock()
        self._open: set[str] = set()
        self._deferred: dict[str, list[Write]] = {}
        self._threads: dict[str, threading.Thread] = {}

    def is_open(self, session: str) -> bool:
        """Whether the peer has answered, and no write waits for it here."""
        return session in self._open

    def defer(self, write: Write) -> None:
        """``write`` is delivered once its peer has answered, or refused if the peer does not answer.

        Raises:
            TransferError: No thread can be started to ask the peer. The write is forgotten.
        """
        with self._opening_lock:
            if write.session not in self._open:
                self._deferred.setdefault(write.session, []).append(write)
                self._start_probe(write.session)
                return
        self._backend.deliver(write)

    def close(self, timeout_s: float) -> bool:
        """Refuses all writes that wait. Waits up to ``timeout_s`` for the probes. Returns whether all have ended."""
        with self._opening_lock:
            threads = list(self._threads.values())
            refused = [write for writes in self._deferred.values() for write in writes]
            self._deferred.clear()
        for write in refused:
            self._backend.refuse(write)
        for thread in threads:
            thread.join(timeout_s / len(threads))
        return not any(thread.is_alive() for thread in threads)

    def _start_probe(self, session: str) -> None:
        if session not in self._threads:
            thread = threading.Thread(target=self._open_peer, args=(session,), name=_THREAD_NAME, daemon=True)
            try:
                thread.start()  # It waits for our lock before it looks for writes.
            except RuntimeError as error:
                del self._deferred[session]  # Its one write. Nobody waits for it: it must not leave later.
                raise TransferError(f"the transport cannot open its peer: {error}") from error
            self._threads[session] = thread

    def _open_peer(self, session: str) -> None:
        is_alive = self._is_alive(session)
        settle = self._backend.deliver if is_alive else self._backend.refuse
        while writes := self._take(session, is_alive=is_alive):
            for write in writes:
                settle(write)

    def _is_alive(self, session: str) -> bool:
        try:
            return self._backend.probe(session)
        except Exception as error:  # noqa: BLE001  # top of a thread: else its writes would wait until their deadlines
            _LOG.warning("transport peer not probed reason=%s", error)
            return False

    def _take(self, session: str, *, is_alive: bool) -> list[Write]:
        """Takes the writes that wait for the peer. If there are none, the probe is over, and a live peer is open."""
        with self._opening_lock:
            writes = self._deferred.pop(session, [])
            if not writes:
                del self._threads[session]
                if is_alive:
                    self._open.add(session)
            return writes
