"""Reads one file that a flag names, and that may be replaced at any time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from pdcluster_protocol.errors import ConfigError

MAX_FILE_BYTES: Final = 1 << 20


def read_file(path: Path, flag: str) -> bytes:
    """The content of the file.

    Raises:
        ConfigError: It cannot be read, or is too large. The message names ``flag``.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            raw = file.read(MAX_FILE_BYTES + 1) or b""
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}: name a file that this process can read") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{flag} {path}: it is larger than {MAX_FILE_BYTES} bytes: name another file")
    return raw


def _open_at_once(path: str, flags: int) -> int:
    """Of a pipe in the file's place comes what is in it now: the router waits for no writer."""
    return os.open(path, flags | os.O_NONBLOCK)
