"""Helps to read PEM files, which may be replaced at any time: sees that they changed, and words their faults.

All parts read certificates and keys, and most may not import each other, so all use this file. Standard library only: a
probe that runs every few seconds imports it.
"""

from __future__ import annotations

import os
import ssl
from typing import TypeAlias

FileState: TypeAlias = tuple[int, int, int] | None
"""Numbers that change when a file is written or replaced, also behind a link. None: the file cannot be looked at."""


def state_of(path: str | os.PathLike[str]) -> FileState:
    """The state of the file now, to compare with its state at an earlier look."""
    try:
        found = os.stat(path)  # noqa: PTH116  # a setting of the connector is text
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def words_of(error: OSError, unsaid: str = "OpenSSL cannot read it") -> str:
    """The reason of an error, for people. ``unsaid``: the answer for an error of OpenSSL that gives no reason."""
    if isinstance(error, ssl.SSLError):
        return error.reason.lower().replace("_", " ") if error.reason else unsaid
    return error.strerror or str(error)


def client_context() -> ssl.SSLContext:
    """A client's context with TLS 1.2 and 1.3 that trusts no certificate yet. The caller may make it trust a root or
    intermediate authority, or the server's own certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def no_password() -> str:
    """An empty password for a key: without this function OpenSSL would ask at the terminal."""
    return ""
