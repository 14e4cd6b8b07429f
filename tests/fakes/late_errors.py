"""Errors of a device that runs beside the host: they appear at a later call than the one that gave the work.

    STAYS      the operation is not done, and nothing after it; from then on every call of every thread raises
    ONCE       the operation is not done; of all threads the one that calls next is told, and no other ever is

CUDA's errors of kernels stay, and end its process. No device was seen to tell of one once, to any thread: then all
other threads go on with what was never computed. The forward thread is not told here: vLLM's engine would end, and with
it all that a test could see.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from enum import Enum, auto
from typing import Final

_OURS: Final = "pdcluster-"
"""Of the names of the connector's threads."""


class Kind(Enum):
    STAYS = auto()
    ONCE = auto()


class LateErrors:
    """Of one device, whose streams and threads ask it. A test says which operation fails."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards all that follows."""
        self._kind = Kind.ONCE
        self._num_before: int | None = None
        self._is_untold = self._has_stayed = False
        self._deaf: Collection[threading.Thread] = ()
        self.num_told = 0
        """How often a thread was told."""

    def fail(self, kind: Kind, *, num_before: int = 0, deaf: Collection[threading.Thread] = ()) -> None:
        """An operation will fail, the one that follows ``num_before`` others of whatever stream.

        ``deaf``: threads that are not told.
        """
        with self._lock:
            self._kind, self._num_before, self._deaf = kind, num_before, deaf

    def forgo(self) -> None:
        """No operation fails that has not yet."""
        with self._lock:
            self._num_before = None

    @property
    def has_failed(self) -> bool:
        """Whether the operation that was to fail has come."""
        with self._lock:
            return self._is_untold or self._has_stayed or self.num_told > 0

    def spoil(self) -> bool:
        """Whether the operation that begins now is not done. A stream's own thread."""
        with self._lock:
            if self._has_stayed or self._num_before is None:
                return self._has_stayed
            self._num_before -= 1
            if self._num_before >= 0:
                return False
            self._num_before = None
            self._is_untold, self._has_stayed = True, self._kind is Kind.STAYS
            return True

    def tell(self) -> None:
        """Any call to the device.

        Raises:
            RuntimeError: An operation has failed.
        """
        thread = threading.current_thread()
        if not thread.name.startswith(_OURS):
            return
        with self._lock:
            if not self._is_untold or thread in self._deaf:
                return
            self._is_untold = self._has_stayed
            self.num_told += 1
        raise RuntimeError("device error: an illegal memory access was encountered; it may be of an earlier call")
