"""The limit of open files of this process. Standard library only."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

SetLimit: TypeAlias = Callable[[int, tuple[int, int]], None]
"""``resource.setrlimit``."""


def raise_open_file_limit(set_limit: SetLimit = resource.setrlimit) -> None:
    """The process may open as many files as the system lets it: many start with 1024. A router needs up to four for
    each request, an operator one for each watch. If the system does not grant its own limit, the old one stays."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # Some systems name a limit that they do not grant.
        set_limit(resource.RLIMIT_NOFILE, (hard, hard))
