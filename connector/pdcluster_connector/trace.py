"""Writes one JSON line for each ended push or receive."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

import msgspec

from pdcluster_protocol.trace import PushTrace, ReceiveTrace

_LOG: Final = logging.getLogger("vllm.pdcluster.trace")


class Trace:
    """Appends lines to one file; several processes may share it. Never called by the forward pass."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None

    def write(self, line: PushTrace | ReceiveTrace) -> None:
        """Append ``line``. Does nothing if no file was asked for, or after the file could not be written."""
        path = self._path  # another thread may stop the trace meanwhile
        if path is None:
            return
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(msgspec.to_builtins(line), separators=(",", ":")) + "\n")
        except OSError as error:
            # A full disk must not fail a request.
            _LOG.warning("trace stopped path=%s error=%s", path, error)
            self._path = None
