"""A thread of its own in which somebody who is played looks again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from patience import PATIENCE_S


class Rounds:
    """``look`` every ``pause_s`` seconds, from now on. ``close`` joins the thread."""

    def __init__(self, name: str, look: Callable[[], None], pause_s: float) -> None:
        self._look = look
        self._pause_s = pause_s
        self._is_closed = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """It has stopped.

        Raises:
            Exception: What it died of.
        """
        self._is_closed.set()
        self._thread.join(PATIENCE_S)
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._is_closed.wait(self._pause_s):
                self._look()
        except Exception as error:  # noqa: BLE001 - the top of a thread; close() raises it
            self._error = error
