"""When a client's connection is read, and how its end is noticed while it is not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

from pdcluster_router.http.leavers import Leavers


def _nothing() -> None:
    """Reads nothing: the connection is lost."""


class Flow(FlowControl):
    """uvicorn's flow control, and two things more. It notices a client that leaves while reading is paused. When
    reading resumes, bytes that have come already are read first. Only a page that waits for its client has an event:
    an asyncio.Event takes 0.8 KB, and hot answers need none.
    """

    __slots__ = (
        "_descriptor",
        "_go_on",
        "_leavers",
        "_transport",
        "_writable",
        "read_paused",
        "write_paused",
    )

    def __init__(self, transport: asyncio.Transport, go_on: Callable[[], None], leavers: Leavers) -> None:
        # Not the parent's, which makes an event. No method of the parent that uses the event is left.
        self._transport = transport
        self.read_paused = False
        self.write_paused = False
        self._writable: asyncio.Event | None = None
        """Set when the client takes bytes again; None: no page waits for that."""
        self._go_on = go_on
        self._leavers = leavers
        self._descriptor = -1

    async def drain(self) -> None:
        if self.write_paused:
            self._writable = self._writable or asyncio.Event()
            await self._writable.wait()

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        writable, self._writable = self._writable, None
        if writable is not None:
            writable.set()

    def pause_reading(self) -> None:
        if self.read_paused:
            return
        super().pause_reading()
        if not self._transport.is_closing():
            self._descriptor = self._transport.get_extra_info("socket").fileno()
            self._leavers.watch(self._descriptor, self._client_left)

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._leavers.forget(self._descriptor)
            self._go_on()

    def end(self) -> None:
        """The connection is lost. Its protocol refers to this object, so this object forgets the protocol."""
        self._go_on = _nothing
        if self.read_paused:
            self.read_paused = False  # A page may ask for its body later, when another client has the descriptor.
            self._leavers.forget(self._descriptor)

    def _client_left(self, *, is_broken: bool) -> None:
        """Closes as the loop does when it reads an end: a client that still reads gets the bytes written so far."""
        if is_broken:
            self._transport.abort()
        else:
            self._transport.close()
