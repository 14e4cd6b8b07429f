"""One file that may be replaced at any time: its content, and the numbers by which a change is noticed.

Kubernetes replaces a mounted Secret by another target of a link.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, TypeAlias

from pdcluster_protocol.errors import ConfigError

MAX_FILE_BYTES: Final = 1 << 20

FileState: TypeAlias = tuple[int, int, int] | None
"""Numbers that change when a file is written or replaced, also behind a link. None: it cannot be looked at."""


def read_file(path: Path, flag: str) -> bytes:
    """The content of the file.

    Raises:
        ConfigError: It cannot be read, or is too large. The message names ``flag``.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}: name a file that this process can read") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{flag} {path}: it is larger than {MAX_FILE_BYTES} bytes: name another file")
    return raw


def state_of(path: Path) -> FileState:
    """The state of the file now, to compare with that of an earlier look."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _open_at_once(path: str, flags: int) -> int:
    """A pipe in the file's place counts as empty: the router does not wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)
