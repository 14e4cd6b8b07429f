"""One JSON line for each ended push or receive, for reports and tests. Times are CLOCK_MONOTONIC seconds."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_LOG: Final = logging.getLogger("vllm.pdcluster.trace")


class Trace:
    """Appends events to one file; several processes may share it. Never called by the forward pass."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None

    def write(self, event: Mapping[str, object]) -> None:
        """Append ``event`` as one line; nothing when no file was asked for."""
        path = self._path  # another thread may stop the trace meanwhile
        if path is None:
            return
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event, separators=(",", ":")) + "\n")
        except OSError as error:
            # A full disk must not cost a request.
            _LOG.warning("trace stopped path=%s error=%s", path, error)
            self._path = None
