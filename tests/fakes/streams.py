"""Streams that run beside the host, as an accelerator's do: each is one thread, and the test says how far it may go.

    stream.hold()       what is not begun yet waits ...
    stream.let(2)       ... but for two more operations
    stream.settle()     the stream can go no further
    stream.release()    it runs freely again

Nothing sleeps and nothing is timed, so a race is lost or won by what the test allowed. An event is a place in its
stream. An operation that raises breaks its stream, and every later question to it raises. What is late at that, and
seen by others too, is in ``late_errors.py``.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Self, TypeAlias

from fakes.late_errors import LateErrors
from patience import PATIENCE_S, until

Work: TypeAlias = Callable[[], object]
ENOUGH_LOOKS: Final = 3
"""Who asked so often for an event that is not complete, and did nothing else, waits for it."""
A_MOMENT_S: Final = 0.002
"""What others see of a stream's progress between two steps of a test; no outcome depends on it."""
_THREAD: Final = "stream-"


def is_stream_thread() -> bool:
    """Whether this is the thread of a stream, which does work and gives none."""
    return threading.current_thread().name.startswith(_THREAD)


class AsyncEvent:
    """Complete once its stream has done ``place`` operations."""

    def __init__(self, stream: AsyncStream, place: int) -> None:
        self._stream = stream
        self._place = place
        self.num_not_yet = 0
        """How often it was asked too early."""

    def query(self) -> bool:
        self._stream.require_entered()
        is_done = self._stream.num_done >= self._place
        self._stream.tell()
        self.num_not_yet += not is_done
        return is_done

    def wait(self) -> None:
        """The event is complete. For other streams, and for hosts that read what the device has written.

        Raises:
            TimeoutError: The test did not let the stream go on.
        """
        self._stream.wait_for(self._place)


class AsyncStream:
    """Any thread may give it work; one does it."""

    def __init__(
        self,
        name: str,
        entered: Callable[[AsyncStream], AbstractContextManager[object]],
        require_entered: Callable[[], None] = lambda: None,
        late: LateErrors | None = None,
    ) -> None:
        """``entered``: what makes the stream the one of the calling thread for a while.
        ``require_entered``: raises in a thread that has not named its device."""
        self.name = name
        self.require_entered = require_entered
        self.events: list[AsyncEvent] = []
        """Of every ``record_event``, in order."""
        self._entered = entered
        self._late = late or LateErrors()
        self._within = threading.local()
        self._work: deque[Work] = deque()
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._num_given = self._num_begun = self._num_done = 0
        self._limit = math.inf
        self._failure: Exception | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._main, name=_THREAD + name, daemon=True)
        self._thread.start()

    # What PyTorch's streams do.

    def record_event(self) -> AsyncEvent:
        """An event behind all that was given so far."""
        self._late.tell()
        with self._changed:
            self.events.append(AsyncEvent(self, self._num_given))
        return self.events[-1]

    def __enter__(self) -> Self:
        manager = self._entered(self)
        manager.__enter__()
        self._stack.append(manager)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._stack.pop().__exit__(kind, error, trace)

    @property
    def _stack(self) -> list[AbstractContextManager[object]]:
        """Of the calling thread."""
        if not hasattr(self._within, "stack"):
            self._within.stack = []
        stack: list[AbstractContextManager[object]] = self._within.stack
        return stack

    # What a device does.

    @property
    def num_given(self) -> int:
        """Operations so far, done or not."""
        with self._changed:
            return self._num_given

    @property
    def num_done(self) -> int:
        """Operations that are over.

        Raises:
            RuntimeError: One has failed.
        """
        with self._changed:
            self._require_whole()
            return self._num_done

    def give(self, work: Work) -> None:
        """One more operation, after all others. Never waits."""
        with self._changed:
            self._work.append(work)
            self._num_given += 1
            self._changed.notify_all()

    def tell(self) -> None:
        """Raises what the device has to tell."""
        self._late.tell()

    def give_wait(self, event: AsyncEvent) -> None:
        """What follows begins after ``event``, as with ``torch.Stream.wait_event``. One operation."""
        self.give(event.wait)

    def wait_for(self, place: int) -> None:
        """``place`` operations are over. The host waits.

        Raises:
            TimeoutError: The test did not let the stream go on.
        """
        self._wait(lambda: self._num_done >= place)

    def synchronize(self) -> None:
        """All that was given is done. The host waits."""
        with self._changed:
            given = self._num_given
        self.wait_for(given)

    # What a test says.

    def hold(self) -> None:
        """What is not begun yet waits."""
        with self._changed:
            self._limit = self._num_begun

    def let(self, count: int = 1) -> None:
        """``count`` further operations may be done."""
        with self._changed:
            self._limit += count
            self._changed.notify_all()

    def release(self) -> None:
        """Everything may be done, now and later."""
        self.let(2**62)

    def settle(self) -> None:
        """The stream has done all that it may do. Not for an operation that waits for another stream."""
        self._wait(lambda: self._num_done >= min(self._num_given, self._limit))

    def settle_soon(self) -> None:
        """As ``settle``, but an operation that waits for another stream is left alone after a moment."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_done >= min(self._num_given, self._limit), A_MOMENT_S)

    def is_awaited(self, number: int, is_early: Callable[[], bool]) -> bool:
        """Whether somebody asked for this event, and again, and nothing happened that ``is_early`` sees."""
        assert until(lambda: is_early() or self._has_enough_looks(number)), (
            f"no event {number} of {self.name} is asked for"
        )
        return not is_early()

    def _has_enough_looks(self, number: int) -> bool:
        return len(self.events) > number and self.events[number].num_not_yet >= ENOUGH_LOOKS

    def stop(self) -> None:
        """What was not begun is never done, and waits for it end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def join(self) -> None:
        """The thread has ended. After ``stop``, of every stream that it may wait for too."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"stream {self.name} does not end"

    def _wait(self, is_true: Callable[[], bool]) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: is_true() or self._failure or self._is_closing, PATIENCE_S)
            self._require_whole()
            if not in_time or not is_true():
                raise TimeoutError(f"stream {self.name} does not go on: {self._num_done} of {self._num_given} are done")

    def _require_whole(self) -> None:
        if self._failure:
            raise RuntimeError(f"stream {self.name} is broken: {self._failure!r}") from self._failure

    def _main(self) -> None:
        while (work := self._next()) is not None:
            try:
                if not self._late.spoil():
                    work()
            except Exception as error:  # noqa: BLE001  # top of a thread; the next question to the stream raises it
                self._end(error)
                return
            self._end(None)

    def _next(self) -> Work | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or (self._work and self._num_begun < self._limit))
            if self._is_closing:
                return None
            self._num_begun += 1
            return self._work.popleft()

    def _end(self, failure: Exception | None) -> None:
        with self._changed:
            self._failure = failure
            self._num_done += failure is None
            self._changed.notify_all()
