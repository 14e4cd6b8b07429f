"""How an engine's parts end: side by side, all by one deadline, also where a library's call does not come back.

    the engine ends --> one deadline --> parts --> their threads and sessions

Whatever may block has a thread of its own, and is left behind at the deadline. It may still read and write KV memory
then. So memory of a part that has not ended is kept until the process ends, also where an engine ends inside of a
process that goes on (vLLM without multiprocessing).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol

_LOG: Final = logging.getLogger("vllm.pdcluster.ending")

END_S: Final = 9.0
"""How long an engine waits for all its parts together. Pushes have 5 s to end by themselves, others are cut within 2 s
(``CUT_S``), and the rest is for sessions that no lane has. vLLM 0.33 kills its workers after as many seconds
(``VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS``, 5 s, and 4 s more)."""


class RunningPart(Protocol):
    """A running part of the connector."""

    def close(self, deadline: float) -> bool:
        """Ends the part, and waits until ``deadline`` (monotonic seconds). Returns whether it leaves KV alone now."""


class EndingThread:
    """The end of one thing, in a daemon thread. Nothing waits for the thread but ``wait``.

    Where no thread can be started, the caller ends the thing itself: a process may be out of threads, and Python 3.12.1
    starts none in exit handlers (vLLM without multiprocessing ends its engine in one).
    """

    def __init__(self, end: Callable[[], bool], name: str = "pdcluster-end") -> None:
        """``end`` returns whether the thing has ended."""
        self._end = end
        self._has_ended = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._main()

    def wait(self, deadline: float) -> bool:
        """Whether the thing has ended. Waits for it until ``deadline`` (monotonic seconds)."""
        if self._thread.ident is not None:
            self._thread.join(left_s(deadline))
        return self._has_ended

    @property
    def is_at_it(self) -> bool:
        """Whether ``end`` has not come back."""
        return self._thread.is_alive()

    def _main(self) -> None:
        try:
            self._has_ended = self._end()
        except Exception:  # noqa: BLE001  # top of a thread: the others still end
            _LOG.exception("part of the connector not ended")


def end_all(ends: Iterable[Callable[[], bool]], deadline: float) -> bool:
    """Ends things side by side. Returns whether all have ended by ``deadline`` (monotonic seconds), or before."""
    return have_ended([EndingThread(end) for end in ends], deadline)


def have_ended(endings: Iterable[EndingThread], deadline: float) -> bool:
    """Whether all have ended. Waits for them until ``deadline`` (monotonic seconds)."""
    verdicts = [ending.wait(deadline) for ending in endings]
    return all(verdicts)


def left_s(deadline: float) -> float:
    """Seconds until ``deadline`` (monotonic seconds); 0.0: it has passed."""
    return max(0.0, deadline - time.monotonic())


_kept: Final[list[RunningPart]] = []
"""Parts that end just now, and those whose end has not come. They hold their memory."""


def end_parts(parts: Iterable[RunningPart], within_s: float = END_S) -> None:
    """Ends an engine's parts. Waits up to ``within_s`` for all of them together, whatever blocks.

    Memory of a part that has not ended by then is never given back.
    """
    if sys.is_finalizing():
        return  # No thread runs any more: the process ends now.
    deadline, all_parts = time.monotonic() + within_s, list(parts)
    _kept.extend(all_parts)  # from the start on: a signal may interrupt the wait
    endings = [(part, EndingThread(partial(part.close, deadline))) for part in all_parts]
    ended = [id(part) for part, ending in endings if ending.wait(deadline)]
    _kept[:] = [part for part in _kept if id(part) not in ended]
    if kept := [type(part).__name__ for part in all_parts if id(part) not in ended]:
        _LOG.critical("engine ends, memory of open parts is kept parts=%s waited_s=%g", ",".join(kept), within_s)
