"""``python -m fuzz.noted_router FLAGS``: the router's own process, on a loop that notes how long it stood.

A timer fires at each turn of the loop, at most once in ``BEAT_S``. What the loop's thread has computed from one beat to
the next is what one turn took, and up to ``BEAT_S`` more. The longest goes to the file that ``NOTES`` names: CPU and
wall seconds. CPU is what a quiet machine would take; wall time has all else that this machine does in it. Cutting the
file to no bytes begins anew.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Final

import uvloop

from pdcluster_router.__main__ import main

NOTES: Final = "FUZZ_NOTES"
BEAT_S: Final = 0.001


class NotingLoop(uvloop.Loop):
    """uvloop's, and the beat."""

    def run_forever(self) -> None:
        self._file = os.open(os.environ[NOTES], os.O_RDWR)
        self._longest = [0.0, 0.0]
        self._last = self._now()
        self.call_soon(self._beat)
        super().run_forever()

    def _now(self) -> tuple[float, float]:
        return time.thread_time(), time.monotonic()

    def _beat(self) -> None:
        now = self._now()
        took = [after - before for after, before in zip(now, self._last, strict=True)]
        if not os.fstat(self._file).st_size:
            self._note([0.0, 0.0])
        elif took > self._longest:
            self._note(took)
        self._last = now
        self.call_later(BEAT_S, self._beat)

    def _note(self, took: list[float]) -> None:
        self._longest = took
        os.pwrite(self._file, b"%.6f %.6f\n" % tuple(took), 0)


if __name__ == "__main__":
    uvloop.new_event_loop = NotingLoop  # What uvicorn asks for one; no setting of its own names another.
    sys.exit(main(sys.argv[1:]))
