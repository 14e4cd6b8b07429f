"""The interfaces of a cycle's neighbours: its connection, the owner of its answer, and the source of a stream."""

from __future__ import annotations

from typing import Protocol


class CycleOwner(Protocol):
    """The object that works on the answer."""

    def client_gone(self) -> None:
        """The client has left. Called at most once, and not after the answer is over."""
        ...

    def pause(self) -> None:
        """The client reads slower than we write: write no more until ``resume``."""
        ...

    def resume(self) -> None: ...


class StreamSource(Protocol):
    """The answer behind a stream: the facts that are needed to put a comment between its events."""

    @property
    def num_streamed_bytes(self) -> int:
        """Bytes of the answer that have gone to the client."""
        ...

    @property
    def may_comment(self) -> bool:
        """Whether a comment tears no event, and the answer is, or may become, a stream of events."""
        ...

    @property
    def stream_lines(self) -> bytes:
        """The header lines that the answer begins with; empty: its engine has sent none yet."""
        ...


class ClientConnection(Protocol):
    """The connection of a cycle, as the cycle needs it."""

    @property
    def is_full(self) -> bool:
        """Whether written bytes pile up because the client reads too slowly."""
        ...

    def write(self, data: bytes) -> None: ...

    def answered(self) -> None:
        """The answer is over: the next request may be answered."""
        ...

    def close(self, *, with_reset: bool = False) -> None:
        """Closes the connection once everything written is sent, or the client has taken too long to read it.

        ``with_reset``: by a reset, so that the client sees that the end is not clean.
        """
        ...
