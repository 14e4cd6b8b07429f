"""Decides when requests at an engine are lost although its connections stay open. Only its probes tell.

An engine whose core has died may never answer what it has, and may never hang up. A probe has one of four signs:

    probe of /health                               sign      a request without a byte is lost after
    200                                            WELL      -
    connection refused, or 503 (vLLM's core died)  DEAD      gone_s of such probes without a break
    no answer in time, cut off, no route           SILENT    silent_s of failed probes without a break
    any other status, or a limit of this router    UNKNOWN   -

A process that is stopped, busy or far away is SILENT. It may still answer, so its requests get more time. UNKNOWN ends
an outage as WELL does, because it says nothing of the engine's core.

Decides from probes and times alone. ``requests/exchange.py`` asks, and carries out what becomes of the request.
"""

from __future__ import annotations

import errno
import math
from enum import Enum, auto
from typing import Final


class Sign(Enum):
    """The meaning of one probe."""

    WELL = auto()
    DEAD = auto()
    """Nothing serves requests there."""
    SILENT = auto()
    """It may be dead, stopped, busy or cut off."""
    UNKNOWN = auto()
    """The probe says nothing of the engine: another server answers there, or this router could not ask."""


def sign_of_status(status: int) -> Sign:
    """The sign of an answer to ``/health``. vLLM 0.32 ``instrumentator/health.py``: 503 when the engine's core died."""
    return {200: Sign.WELL, 503: Sign.DEAD}.get(status, Sign.UNKNOWN)


def sign_of_failure(error_number: int, *, is_ours: bool) -> Sign:
    """The sign of a probe without an answer. ``error_number``: the operating system's, 0 where it named none; below 0
    for a name that cannot be resolved. ``is_ours``: the cause is a limit of this router, or this router does not
    trust the server there.
    """
    if is_ours or error_number < 0:
        return Sign.UNKNOWN
    return Sign.DEAD if error_number == errno.ECONNREFUSED else Sign.SILENT


_NEVER: Final = math.inf


class Outage:
    """The failed probes of one engine since its last good one."""

    __slots__ = ("_dead_since", "_failing_since", "_probed_at")

    def __init__(self) -> None:
        self._probed_at = 0.0
        self._failing_since = _NEVER
        """Monotonic seconds of the first of the SILENT and DEAD probes that followed each other."""
        self._dead_since = _NEVER
        """Monotonic seconds of the first of the DEAD probes that followed each other."""

    def saw(self, sign: Sign, *, now: float, most_s: float) -> None:
        """A probe has ended with ``sign``. Time beyond ``most_s`` since the probe before does not count: this router
        was stopped then, and has seen nothing.
        """
        unseen_s = max(0.0, now - self._probed_at - most_s)
        is_dead = sign is Sign.DEAD
        self._failing_since = _begin(self._failing_since + unseen_s, now, goes_on=is_dead or sign is Sign.SILENT)
        self._dead_since = _begin(self._dead_since + unseen_s, now, goes_on=is_dead)
        self._probed_at = now

    def why_lost(self, quiet_since: float, *, gone_s: float, silent_s: float) -> str:
        """Why a request there is lost; empty: it is not. No byte of its answer has come since ``quiet_since``
        (monotonic seconds).

        Time counts up to the newest probe only: after it, this router may have been stopped.
        """
        dead_s = self._probed_at - max(self._dead_since, quiet_since)
        if dead_s >= gone_s:
            return _IS_DEAD % (dead_s, gone_s)
        failing_s = self._probed_at - max(self._failing_since, quiet_since)
        return _IS_SILENT % (failing_s, silent_s) if failing_s >= silent_s else ""


def _begin(since: float, now: float, *, goes_on: bool) -> float:
    return min(since, now) if goes_on else _NEVER


_IS_DEAD: Final = (
    "it is gone: for %.0f s it refused connections or answered 503 to /health, and sent no byte (--engine-gone is "
    "%g s). Look at its log and restart it; if it was only shutting down slowly, raise --engine-gone"
)
_IS_SILENT: Final = (
    "it hangs: for %.0f s its /health gave no answer, and it sent no byte (--idle-timeout is %g s). Look at its log, "
    "its machine and the network, and restart it"
)
