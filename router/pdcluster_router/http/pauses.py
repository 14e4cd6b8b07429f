"""Closes a connection that has been idle too long. One timer serves all pauses of a connection.

    answer over --> pause --bytes come--> busy
                      +-- the timer finds that this pause has lasted its time --> closed

uvicorn sets a timer at the end of each answer and cancels it at the next request, which costs 2 us. Here the timer
stays, and is set anew for the rest of a pause that has not lasted long enough. ``idle_since`` is a plain attribute:
each read and the beginning of each request set it to None.

A subclass of uvicorn 0.54's ``HttpToolsProtocol``.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdcluster_router.http.slots import UVICORN


class PausingProtocol(HttpToolsProtocol):
    """The pauses of one connection. Event loop only."""

    __slots__ = (*UVICORN, "idle_since")

    idle_since: float | None
    """When the pause began, in the loop's time; None: there is none. Set by the subclass from the beginning."""

    def go_on_or_pause(self) -> None:
        """An answer is over. Does what the parent's ``on_response_complete`` does, but for the timer."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self.begin_pause()

    def begin_pause(self) -> None:
        """The connection is idle. It closes if no request begins in time."""
        self.idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_in(self.timeout_keep_alive)

    def _look_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self.timeout_keep_alive_task = None
        if self.idle_since is None:
            return  # The end of the answer sets the timer again.
        left_s = self.idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._look_in(left_s)
        else:
            self.timeout_keep_alive_handler()
