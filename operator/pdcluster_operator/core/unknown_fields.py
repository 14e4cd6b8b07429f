"""Fields of a newer CRD in one PDCluster, as long as two ways of reading it disagree about them.

When a CRD changes, the API server answers writes by the new schema at once, and shows a watch that was open then the
old one until it ends that watch (Kubernetes 1.35, apiextensions-apiserver ``customresource_handler.go``: the old
storage is torn down when its running requests are over, or after two request timeouts of 60 s). Without a memory the
fields come and go with each answer, and each time is a write that makes the next one.
"""

from __future__ import annotations

from typing import Final

OLD_WATCH_S: Final = 300
"""No watch that was open when the CRD changed is left after this time; with room to spare for a slow server."""


class UnknownFields:
    """The unknown fields of one PDCluster. One task owns it."""

    def __init__(self) -> None:
        self._seen_s: dict[str, int] = {}

    def told(self, shown: tuple[str, ...], now: int) -> tuple[str, ...]:
        """The names to tell ``now``, of an object that shows these. A name that is not shown is remembered for
        ``OLD_WATCH_S``."""
        seen_s = self._seen_s | dict.fromkeys(shown, now)
        self._seen_s = {name: at for name, at in seen_s.items() if now - at < OLD_WATCH_S}
        return tuple(sorted(self._seen_s))

    def forgets_after_s(self, now: int) -> int | None:
        """When to look again, for a name may be remembered no longer; None: none is."""
        return min((at + OLD_WATCH_S - now for at in self._seen_s.values()), default=None)
