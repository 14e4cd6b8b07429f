"""Writes one JSON line for each ended request, with the times of its steps. Off by default."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.trace import RequestTrace

logger = logging.getLogger(__name__)

MAX_LINES: Final = 10_000
"""Lines that wait for the disk, some 4 MiB: a second of the busiest router."""


class TraceFile:
    """Appends lines to a file, in a thread of its own: a disk that is slow or full holds up no request.

    Lines that cannot be written are lost and counted; it is logged when that begins and when it is over. Owned by the
    router; without a path it does nothing.
    """

    def __init__(self, path: Path | None, count_lost: Callable[[int], None] = lambda _: None) -> None:
        """Opens the file. ``count_lost``: so many lines more are lost; called in either thread.

        Raises:
            ConfigError: It cannot be written.
        """
        self._lines: queue.Queue[bytes] = queue.Queue(MAX_LINES)
        self._count_lost = count_lost
        self._is_failing = False
        self._is_torn = False
        self._thread: threading.Thread | None = None
        if path is None:
            return
        try:
            file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--trace-file {path}: {error.strerror}: name a file that can be written") from error
        self._thread = threading.Thread(target=self._write_all, args=(file,), name="pdcluster-trace", daemon=True)
        self._thread.start()

    def write(self, line: RequestTrace) -> None:
        """The line is on its way to the file. Never waits."""
        if self._thread is None:
            return
        try:
            self._lines.put_nowait(msgspec.json.encode(line) + b"\n")
        except queue.Full:
            self._count_lost(1)

    def close(self) -> None:
        """Everything is written that can be. Waits up to 2 s for a disk that stands still."""
        if self._thread is None:
            return
        deadline = time.monotonic() + _CLOSE_S
        with contextlib.suppress(queue.Full):
            self._lines.put(_END, timeout=_CLOSE_S)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._thread = None

    # Everything below runs in the file's own thread.

    def _write_all(self, file: BinaryIO) -> None:
        with file:
            while lines := self._next_lines():
                is_last = lines[-1] is _END
                if is_last:
                    lines.pop()
                if lines:
                    self._write_lines(file, lines)
                if is_last:
                    return

    def _next_lines(self) -> list[bytes]:
        """Waits for one, and takes with it what is there."""
        lines = [self._lines.get()]
        while lines[-1] is not _END and not self._lines.empty():
            lines.append(self._lines.get())
        return lines

    def _write_lines(self, file: BinaryIO, lines: list[bytes]) -> None:
        # After a write that broke off in a line the next one begins a line of its own.
        wanted = b"".join([b"\n" if self._is_torn else b"", *lines])
        try:
            num_written = file.write(wanted)
        except OSError as error:
            self._lost(len(lines), error.strerror or str(error))
            return
        self._is_torn = num_written < len(wanted)
        if self._is_torn:
            self._lost(wanted.count(b"\n", num_written), "the disk took a part only")
        elif self._is_failing:
            self._is_failing = False
            logger.warning("trace is written again")

    def _lost(self, num_lines: int, reason: str) -> None:
        self._count_lost(num_lines)
        if not self._is_failing:
            self._is_failing = True
            logger.warning("trace lines are lost reason=%s: make room on the disk of --trace-file", reason)


_CLOSE_S: Final = 2.0
_END: Final = b""
"""``close`` puts this behind the last line."""
