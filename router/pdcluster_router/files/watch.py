"""Files that are read again when they change: API keys, certificates, authorities. One loop for all of them.

    WATCHED --a look finds other numbers (inode, time, size), or SIGHUP--> read anew --> WATCHED

Kubernetes replaces a mounted Secret without a word, so the files are looked at every few seconds. How they are read,
and that files which cannot be used change nothing, is their owner's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from pdcluster_router.files.reading import FileState, state_of


class FileWatch:
    """Some files that are read together. Event loop only."""

    def __init__(self, paths: Sequence[Path], interval_s: float, read: Callable[[], None]) -> None:
        """Make it before they are read for the first time. ``read``: reads all of them anew; it raises nothing."""
        self._paths = tuple(paths)
        self._interval_s = interval_s
        self._read = read
        self._looked_at = self._look()

    def reload(self) -> None:
        """They are read now, whether they have changed or not."""
        self._looked_at = self._look()
        self._read()

    async def run(self) -> None:
        """For ever: they are read whenever they have changed. One task owns this."""
        while True:
            await asyncio.sleep(self._interval_s)
            if self._look() != self._looked_at:
                self.reload()

    def _look(self) -> tuple[FileState, ...]:
        """Before they are read: what changes meanwhile is seen at the next look."""
        return tuple(map(state_of, self._paths))
