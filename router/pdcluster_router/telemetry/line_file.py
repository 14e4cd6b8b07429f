"""A file that gets lines from the event loop, and a thread that writes them: a slow or full disk holds up no request.

Lines that cannot be written are lost and counted. The log says when that begins and when it is over. A file that was
moved away, as logrotate does, is opened anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Final

from pdcluster_protocol.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_LINES: Final = 10_000
"""Lines that wait for the disk, some 4 to 10 MiB: a second of the busiest router."""
STDOUT: Final = Path("-")
"""Stands for standard output in place of a file's name."""


class LineFile:
    """Appends lines. Event loop only; ``close`` ends its thread."""

    def __init__(self, path: Path, flag: str, count_lost: Callable[[int], None] = lambda _: None) -> None:
        """Opens the file. ``flag``: names it in messages. ``count_lost``: called with the number of lines that are
        lost, in either thread.

        Raises:
            ConfigError: It cannot be written.
        """
        self._path = path
        self._flag = flag
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._num_put = 0
        self._num_taken = 0
        """Lines put and taken so far. Two numbers, so that each has one writer: the event loop's thread, and the
        file's."""
        self._count_lost = count_lost
        self._is_failing = False
        self._is_torn = False
        try:
            self._file = _open(path)
        except OSError as error:
            raise ConfigError(f"{flag} {path}: {error.strerror}: name a file that can be written") from error
        self._thread = threading.Thread(target=self._write_all, name=f"pdcluster {flag}", daemon=True)
        self._thread.start()

    def write(self, lines: bytes, num_lines: int = 1) -> None:
        """Hands the lines, with their ends, to the file's thread, or counts them as lost. Never waits."""
        if self._num_put - self._num_taken + num_lines > MAX_LINES:
            self._count_lost(num_lines)
        else:
            self._num_put += num_lines
            self._lines.put(lines)

    def close(self) -> None:
        """Writes all that can be written. Waits up to 2 s for a disk that stands still."""
        self._lines.put(_END)
        self._thread.join(_CLOSE_S)

    # Everything below runs in the file's own thread.

    def _write_all(self) -> None:
        while lines := self._next_lines():
            is_last = lines[-1] is _END
            if is_last:
                lines.pop()
            if lines:
                self._open_if_replaced()
                self._write_lines(lines)
            if is_last:
                self._file.close()
                return

    def _next_lines(self) -> list[bytes]:
        """Waits for lines, and takes all that are there."""
        lines = [self._lines.get()]
        while lines[-1] is not _END and not self._lines.empty():
            lines.append(self._lines.get())
        return lines

    def _open_if_replaced(self) -> None:
        """Opens the file anew if its name is another file's now. If that cannot be opened, the old file stays."""
        with contextlib.suppress(OSError):
            if self._path != STDOUT and not _has_name(self._file, self._path):
                old, self._file = self._file, _open(self._path)
                old.close()

    def _write_lines(self, lines: list[bytes]) -> None:
        # After a write that broke off within a line, the next write begins a line of its own.
        whole = b"".join(lines)
        self._num_taken += whole.count(b"\n")
        wanted = b"\n" + whole if self._is_torn else whole
        try:
            num_written = self._file.write(wanted) or 0  # None: the pipe is full, and does not wait.
        except OSError as error:
            self._lost(whole.count(b"\n"), error.strerror or str(error))
            return
        if num_written:
            self._is_torn = wanted[num_written - 1 : num_written] != b"\n"
        if num_written < len(wanted):
            self._lost(wanted.count(b"\n", max(num_written, len(wanted) - len(whole))), "it took a part only")
        elif self._is_failing:
            self._is_failing = False
            logger.warning("lines are written again file=%s", self._flag)

    def _lost(self, num_lines: int, reason: str) -> None:
        self._count_lost(num_lines)
        if not self._is_failing:
            self._is_failing = True
            logger.warning("lines are lost file=%s reason=%s: see that it can be written", self._flag, reason)


def _open(path: Path) -> FileIO:
    if path == STDOUT:
        return FileIO(1, "wb", closefd=False)
    # A pipe without a reader is refused rather than waited for.
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    os.set_blocking(opened, True)
    return FileIO(opened, "wb")


def _has_name(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


_CLOSE_S: Final = 2.0
_END: Final = b""
"""``close`` puts this behind the last line."""
