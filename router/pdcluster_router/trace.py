"""One JSON line for each ended request, with the times of its steps.

Times are seconds of CLOCK_MONOTONIC, so that files of several processes on one machine compare; null where
a step did not happen. Off by default; when on, each line costs one small write.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import TransferId


@dataclass(slots=True)
class Times:
    """What happened to one request, and when. Filled in by its exchange alone."""

    transfer_id: TransferId
    request_id: str
    received_at: float
    reserved_at: float | None = None
    prefill_sent_at: float | None = None
    prefill_replied_at: float | None = None
    first_byte_at: float | None = None
    """First body byte from decode."""
    ended_at: float | None = None
    """The client's answer was over, or the client was."""
    status: int | None = None
    """HTTP status that the client got; null when it left before."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class TraceFile:
    """Appends lines to a file. Owned by the router; without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        """Opens the file.

        Raises:
            ConfigError: It cannot be written.
        """
        self._file: BinaryIO | None = None
        if path is None:
            return
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--trace-file {path}: {error.strerror}: name a file that can be written") from error

    def write(self, times: Times) -> None:
        if self._file is not None:
            self._file.write(orjson.dumps({"event": "request", **asdict(times)}) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
