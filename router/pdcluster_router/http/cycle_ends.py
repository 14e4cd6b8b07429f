"""The interfaces that a cycle needs: of its connection, of what works on its answer, of a stream with comments."""

from __future__ import annotations

from typing import Protocol


class CycleOwner(Protocol):
    """The object that works on the answer."""

    def client_gone(self) -> None:
        """The client reads the answer no more. Comes at most once, and not after the answer is over."""
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
    """The connection that a cycle came on, as far as the cycle needs it."""

    @property
    def is_full(self) -> bool:
        """Whether written bytes pile up because the client reads too slowly."""
        ...

    def write(self, data: bytes) -> None: ...

    def answered(self) -> None:
        """The answer is whole: the next request may be answered."""
        ...

    def close(self, *, with_reset: bool = False) -> None:
        """Closed once everything written is sent, or the client takes it too slowly.

        ``with_reset``: the client sees that it was no clean end.
        """
        ...
