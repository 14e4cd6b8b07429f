"""Remembers fields of our children that somebody else had set and that we set back: what to tell the user, and when.

Kubernetes' page "Server-Side Apply" asks controllers to force conflicts on objects that they own: a field that stays
taken would hold up everything else. But two writers that both insist would write for ever. So if a field is set back a
second time within ``CONTEST_S``, the look counts as failed, and the next look comes at the pace of failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from pdcluster_operator.core.status.conditions import EventReason
from pdcluster_operator.core.status.status_events import EventKind, KubernetesEvent

CONTEST_S: Final = 60
"""Seconds. A field that is set back twice within this time is contested: autoscalers set a field every 15 s."""
TELL_AGAIN_S: Final = 3600
"""Seconds. Kubernetes forgets Events after an hour, so the user is told again."""
MAX_REMEMBERED: Final = 256
"""The most entries in each memory of one PDCluster. They are enough for several entries for each child."""


_K = TypeVar("_K")


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Fields of the child ``ref`` that we set back. ``fields``: as the API server spells them. ``by``: the managers
    that set them."""

    ref: str
    fields: tuple[str, ...]
    by: tuple[str, ...]

    @property
    def words(self) -> tuple[str, str, str]:
        """Child, fields and managers."""
        return self.ref, ", ".join(self.fields), ", ".join(self.by)

    def __str__(self) -> str:
        return "{}: {} was set by {}".format(*self.words)


def event_of(taken: TakenBack) -> KubernetesEvent:
    reason = EventReason.TAKEN_BACK
    return KubernetesEvent(EventKind.WARNING, reason.value, f"{taken}, and was taken back. {reason.cure}")


class TakenBackLog:
    """The fields of one PDCluster that were taken back, and when. One task owns it."""

    def __init__(self) -> None:
        self._taken_s: dict[tuple[str, tuple[str, ...]], int] = {}
        """By child and fields, not by manager: a manager that changes its name still contests the same field."""
        self._told_s: dict[TakenBack, int] = {}
        self._contested: TakenBack | None = None

    def note(self, taken: TakenBack, now: int) -> bool:
        """The fields were taken back ``now``. Returns whether to tell the user: not again within ``TELL_AGAIN_S``."""
        field = taken.ref, taken.fields
        if _is_within(CONTEST_S, self._taken_s.get(field), now):
            self._contested = taken
        _remember(self._taken_s, field, now, CONTEST_S)
        if _is_within(TELL_AGAIN_S, self._told_s.get(taken), now):
            return False
        _remember(self._told_s, taken, now, TELL_AGAIN_S)
        return True

    def pop_contested(self) -> TakenBack | None:
        """The last fields that were contested since the previous call; None: no field was."""
        found, self._contested = self._contested, None
        return found


def _remember(known: dict[_K, int], key: _K, now: int, keep_s: int) -> None:
    """Note that ``key`` was met ``now``. Forget the oldest keys, if they are too old or too many."""
    known.pop(key, None)
    known[key] = now
    for oldest in list(known):
        if len(known) <= MAX_REMEMBERED and _is_within(keep_s, known[oldest], now):
            return
        del known[oldest]


def _is_within(limit_s: int, before: int | None, now: int) -> bool:
    return before is not None and now - before < limit_s
