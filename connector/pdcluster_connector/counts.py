"""What this process has counted since somebody last asked: failures by kind, bytes and transfers."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

PUSHED_BYTES: Final = "pushed_bytes"
PUSHES_DONE: Final = "pushes_done"
RECEIVES_DONE: Final = "receives_done"

_counts_lock = threading.Lock()
_counts: Counter[str] = Counter()


def count(name: str, amount: int = 1) -> None:
    """Add to one count. Any thread; the lock is held for one addition."""
    with _counts_lock:
        _counts[name] += amount


def take_counts() -> dict[str, int]:
    """What was counted since the last call; empty mostly, and cheap then. Any thread."""
    if not _counts:
        return {}
    with _counts_lock:
        taken = dict(_counts)
        _counts.clear()
    return taken
