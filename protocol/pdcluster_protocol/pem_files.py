"""PEM files that may be replaced at any time, as router and connector look at them and tell what is wrong with them.

Both read certificates and keys, and may not import each other. Standard library only.
"""

from __future__ import annotations

import os
import ssl
from typing import TypeAlias

FileState: TypeAlias = tuple[int, int, int] | None
"""Numbers that change when a file is written or replaced, also behind a link. None: it cannot be looked at."""


def state_of(path: str | os.PathLike[str]) -> FileState:
    """The state of the file now, to compare with that of an earlier look."""
    try:
        found = os.stat(path)  # noqa: PTH116  # a setting of the connector is text
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def words_of(error: OSError, unsaid: str = "OpenSSL cannot read it") -> str:
    """OpenSSL's reason, or the system's, for people. ``unsaid``: stands for OpenSSL's where it gives none."""
    if isinstance(error, ssl.SSLError):
        return error.reason.lower().replace("_", " ") if error.reason else unsaid
    return error.strerror or str(error)


def no_password() -> str:
    """An empty password for a key: without this function OpenSSL would ask at the terminal."""
    return ""
