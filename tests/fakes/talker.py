"""A server that does not end its answer: it greets, and then says one thing again and again, fast or slowly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

ENOUGH: Final = 400
"""Times that it says its thing: a reader without a limit ends at last, and its test fails rather than hangs."""


@contextmanager
def talking(greeting: bytes, more: bytes, every_s: float = 0.0) -> Iterator[int]:
    """The port. ``every_s``: between two times."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(greeting)
                for _ in range(ENOUGH):
                    if is_over.wait(every_s):
                        return
                    connection.sendall(more)
                connection.shutdown(socket.SHUT_WR)
                is_over.wait()  # Closed now, with words of the reader unread, it would reset what is on its way.

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            is_over.set()
            thread.join()
