"""Writes one JSON line for each ended request, with the times of its steps. Off by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.telemetry.line_file import LineFile


class TraceFile:
    """Owned by the router; without a path it does nothing."""

    def __init__(self, path: Path | None, count_lost: Callable[[int], None] = lambda _: None) -> None:
        """Opens the file. ``count_lost``: called with the number of lines that are lost, in either thread.

        Raises:
            ConfigError: It cannot be written.
        """
        self.is_on = path is not None
        self._file = None if path is None else LineFile(path, "--trace-file", count_lost)

    def write(self, line: RequestTrace) -> None:
        """Hands the line to the file's thread, or counts it as lost. Never waits."""
        if self._file is not None:
            self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Writes all that can be written. Waits up to 2 s for a disk that stands still."""
        if self._file is not None:
            self._file.close()
            self._file = None
