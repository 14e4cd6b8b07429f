"""Writes one JSON line for each ended push or receive, and hands it to ``tell``, also without a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from pdcluster_protocol.trace import PushTrace, ReceiveTrace

_LOG: Final = logging.getLogger("vllm.pdcluster.trace")


class Trace:
    """Appends lines to one file; several processes may share it. Never called by the forward pass."""

    def __init__(self, path: str, tell: Callable[[PushTrace | ReceiveTrace], None] | None = None) -> None:
        """``tell`` gets each line too, also without a file. It must not wait."""
        self._path = Path(path) if path else None
        self._tell = tell

    def write(self, line: PushTrace | ReceiveTrace) -> None:
        """Append ``line``. No file is written if none was asked for, or after it could not be written."""
        if self._tell is not None:
            self._tell(line)
        path = self._path  # another thread may stop the trace meanwhile
        if path is None:
            return
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(msgspec.to_builtins(line), separators=(",", ":")) + "\n")
        except OSError as error:
            # A full disk must not fail a request.
            _LOG.warning("trace stopped path=%s reason=%s", path, error)
            self._path = None
