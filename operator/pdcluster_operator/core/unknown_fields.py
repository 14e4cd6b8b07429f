"""Remembers fields of a newer CRD in one PDCluster, while answers and watches disagree about them.

When a CRD changes, the API server answers writes by the new schema at once. A watch that was open then shows objects by
the old schema until the server ends that watch (Kubernetes 1.35, apiextensions-apiserver
``customresource_handler.go``: the old storage is torn down when its running requests are over, or after two request
timeouts of 60 s). Without a memory the fields would come and go in status, and each write of status would cause
the next one.
"""

from __future__ import annotations

from typing import Final

OLD_WATCH_S: Final = 300
"""Seconds after a change of the CRD until all older watches have ended, with room for a slow server."""


class UnknownFields:
    """The unknown fields of one PDCluster. One task owns it."""

    def __init__(self) -> None:
        self._seen_s: dict[str, int] = {}

    def told(self, shown: tuple[str, ...], now: int) -> tuple[str, ...]:
        """The names to tell at ``now``: those ``shown`` now, and those shown within ``OLD_WATCH_S`` before."""
        seen_s = self._seen_s | dict.fromkeys(shown, now)
        self._seen_s = {name: at for name, at in seen_s.items() if now - at < OLD_WATCH_S}
        return tuple(sorted(self._seen_s))

    def forgets_after_s(self, now: int) -> int | None:
        """Seconds until the next name is forgotten, so that a look is due; None: none is remembered."""
        return min((at + OLD_WATCH_S - now for at in self._seen_s.values()), default=None)
