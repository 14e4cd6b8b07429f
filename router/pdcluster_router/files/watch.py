"""Files that are read again when they change: API keys, certificates, authorities, engines.

    GOOD --a look finds other numbers (inode, time, size), or SIGHUP--> read anew --usable--> GOOD
                                                                          +--not usable--> BAD --each look--> read anew

Files that cannot be used may become usable as they are: a certificate of tomorrow, or no descriptor for a moment.
Kubernetes replaces a mounted Secret without a word, so the files are looked at every few seconds. Their owner reads
them, and logs what it has read; each reason why they cannot be used is logged once, here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.pem_files import FileState, state_of

logger = logging.getLogger(__name__)


class FileWatch:
    """Some files that are read together. Event loop only."""

    def __init__(self, what: str, paths: Sequence[Path], interval_s: float, read: Callable[[], None]) -> None:
        """Make it before the files are read for the first time. ``what``: the log's name for their content. ``read``:
        reads all of them anew. If they cannot be used, it raises ConfigError and changes nothing."""
        self._what = what
        self._paths = tuple(paths)
        self._interval_s = interval_s
        self._read = read
        self._problem = ""
        """Why the files could not be used when they were read last; empty: they could."""
        self._looked_at = self._look()

    def reload(self) -> None:
        """Reads the files now, whether they have changed or not. The reason why they cannot be used is told anew."""
        self._problem = ""
        self._read_anew()

    async def run(self) -> None:
        """Reads the files whenever they have changed, or could not be used, until cancelled. One task owns this."""
        while True:
            await asyncio.sleep(self._interval_s)
            if self._look() != self._looked_at:
                self.reload()
            elif self._problem:
                self._read_anew()

    def _read_anew(self) -> None:
        self._looked_at = self._look()
        try:
            self._read()
        except ConfigError as error:
            told, self._problem = self._problem, str(error)
            if self._problem != told:
                logger.warning("%s not changed reason=%s", self._what, error)
        else:
            self._problem = ""

    def _look(self) -> tuple[FileState, ...]:
        """The state of the files. Taken before they are read, so that the next look sees a change meanwhile."""
        return tuple(map(state_of, self._paths))
