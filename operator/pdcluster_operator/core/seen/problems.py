"""Tells in words why a pod does not get ready: no place, no image, a failed start, or containers that died. Pure.

A *death* is one end of a container's program. Kubernetes keeps the last death and counts all deaths in one pod. This
file counts the *row*: how many deaths in a row had the same cause, from one picture of the pod to the next. A row of
three is a *crash loop*. A life of more than ten minutes in which the pod was ready ends a row, as it ends the kubelet's
back-off. When a pod is seen for the first time, all its deaths count as one row, unless the pod is older than ten
minutes and a back-off for each death.

LeaderWorkerSets with ``RecreateGroupOnPodRestart`` make a group anew as soon as one of its containers has died. So no
container of theirs is seen waiting in ``CrashLoopBackOff``. A row goes on from a pod to the next pod of the same name.

Source of truth: Kubernetes 1.35, pages "Pod Lifecycle" and "Determine the Reason for Pod Failure"; kubelet
``images/image_manager.go``; LWS 0.7 ``pod_controller.go``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

StatusPart = Mapping[str, Any]
"""A part of an object, as the API server sends it."""

LOOP_DEATHS: Final = 3
"""Deaths of the same cause in a row. Two may be one fault of a node; after a third the container will die again."""
LONG_LIFE_S: Final = 600
"""Seconds. The kubelet begins its back-off anew after a life of ten minutes."""
BACK_OFF_S: Final = 300
"""Seconds: the kubelet's longest wait before a container's next life."""
MAX_WORDS: Final = 600
"""Characters that are kept of a container's last words, and of a message of Kubernetes."""

_STARTS: Final = frozenset({"ContainerCreating", "PodInitializing"})
_BACKS_OFF: Final = "CrashLoopBackOff"
_PULLS: Final = frozenset({"ErrImagePull", "ImagePullBackOff"})
_PULL_ERROR: Final = "ErrImagePull: "
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Death:
    """The last death of one container. ``cause`` empty: the container has lived long since then, and its row is over.

    ``count``: deaths in this pod; 0: the death was in an earlier pod of this name. ``equal``: deaths of this cause in a
    row. ``begins``: this death begins a row, because the life before it was long and the pod was ready in it.
    """

    container: str
    cause: str
    last_words: str
    count: int
    equal: int
    begins: bool = False

    @property
    def is_loop(self) -> bool:
        return self.equal >= LOOP_DEATHS

    def told_of(self, pod: str) -> str:
        times = max(self.count, self.equal)
        often = f"died {times} times, the last time" if times > 1 else "died:"
        words = f": {self.last_words}" if self.last_words else ""
        return f"pod {pod}, container {self.container} {often} {self.cause}{words}"


@dataclass(frozen=True, slots=True)
class _Times:
    """Unix seconds: when a pod was started, and since when it has not been ready. 0: unknown, or the pod is ready."""

    started_s: int
    unready_s: int


def trouble_of(pod: str, status: StatusPart) -> str:
    """Why the cluster does not start the pod, or has failed it; empty: neither is so.

    The text stays the same from try to try, for each change of it is a write of the PDCluster's status.
    """
    placed = condition_of(status, "PodScheduled")
    if placed.get("status") == "False":
        return f"pod {pod} is not placed: {_fitted(str(placed.get('message') or placed.get('reason', '')))}"
    for container, _ in _containers(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if told := _waiting_told(waiting, has_died=_ended_last(container) is not None):
            return f"pod {pod}, container {container['name']}: {told}"
    if status.get("phase") == "Failed" and status.get("reason"):
        return f"pod {pod} has failed: {status['reason']}: {_fitted(str(status.get('message', '')))}".rstrip(": ")
    return ""


def deaths_of(status: StatusPart, *, is_going: bool) -> tuple[Death, ...]:
    """The last death of each container, as this picture of a pod shows it. ``is_going``: the pod terminates, so
    containers that end now have not died."""
    ready = condition_of(status, "Ready")
    unready_s = unix_s_of(ready.get("lastTransitionTime")) if ready.get("status") == "False" else 0
    times = _Times(unix_s_of(status.get("startTime")), unready_s)
    found = (_death_of(container, is_init, times, is_going) for container, is_init in _containers(status))
    return tuple(death for death in found if death)


def counted(now: Iterable[Death], before: Iterable[Death], *, is_same_pod: bool) -> tuple[Death, ...]:
    """``now``, with rows that began in ``before``: an earlier picture of this pod, or of the pod that had its name."""
    known = {one.container: one if is_same_pod else replace(one, count=0) for one in before}
    seen = {one.container: _recounted(one, known.get(one.container)) for one in now}
    carried = {name: one for name, one in known.items() if not one.count and one.cause}
    return tuple(one for one in {**carried, **seen}.values())


def worst_of(deaths: Iterable[Death]) -> Death | None:
    """The death with the longest row; None: there is no death to tell of."""
    told = [one for one in deaths if one.cause]
    return max(told, key=lambda one: one.equal, default=None)


def condition_of(status: StatusPart, kind: str) -> StatusPart:
    return next((one for one in status.get("conditions") or () if one.get("type") == kind), {})


def unix_s_of(text: str | None) -> int:
    return int(datetime.fromisoformat(text).timestamp()) if text else 0


def _containers(status: StatusPart) -> Iterator[tuple[StatusPart, bool]]:
    """Containers, and whether each is an init container. Init containers come first: if one fails, the others wait."""
    yield from ((one, True) for one in status.get("initContainerStatuses") or ())
    yield from ((one, False) for one in status.get("containerStatuses") or ())


def _waiting_told(waiting: StatusPart, *, has_died: bool) -> str:
    """Why a container waits; empty: nothing is wrong, or the container's death says more. Between two tries the kubelet
    puts a prefix before a registry's message. The prefix is cut off, so that the text stays the same."""
    reason, message = waiting.get("reason", ""), str(waiting.get("message") or "")
    if not reason or reason in _STARTS:
        return ""
    if reason == _BACKS_OFF:
        return "" if has_died else reason  # The death says more, and the kubelet's message changes with every try.
    if reason in _PULLS:
        reason, message = "ImagePullBackOff", message.rpartition(_PULL_ERROR)[2]
    return f"{reason}: {_fitted(message)}" if message else str(reason)


def _death_of(container: StatusPart, is_init: bool, times: _Times, is_going: bool) -> Death | None:
    state, restarts = container.get("state") or {}, int(container.get("restartCount") or 0)
    running = state.get("running")
    if running and times.unready_s > unix_s_of(running.get("startedAt")) + LONG_LIFE_S:
        return Death(container["name"], "", "", restarts, 0)
    ended = state.get("terminated")
    if ended and is_init and ended.get("exitCode") == 0:
        return None  # The init container has done its work.
    if ended and not is_going:
        return _as_death(container["name"], ended, restarts + 1, times)
    last = _ended_last(container)
    if last is None:
        return None
    return _as_death(container["name"], last, restarts + (1 if state.get("waiting") and not is_going else 0), times)


def _ended_last(container: StatusPart) -> StatusPart | None:
    return (container.get("lastState") or {}).get("terminated")


def _as_death(name: str, ended: StatusPart, count: int, times: _Times) -> Death:
    ended_s = unix_s_of(ended.get("finishedAt"))
    began_s = unix_s_of(ended.get("startedAt")) or ended_s  # containerd says 1970 if none began (its issue 9080).
    served_long = times.unready_s > began_s + 1 and ended_s > began_s + LONG_LIFE_S
    is_row = not served_long and _are_near(count, times.started_s, began_s, ended_s)
    cause = f"{ended.get('reason') or 'Error'} (exit code {ended.get('exitCode', 'unknown')})"
    words = _fitted(str(ended.get("message") or ""), keep_end=True)
    return Death(name, cause, words, max(count, 1), max(count, 1) if is_row else 1, served_long)


def _are_near(count: int, started_s: int, began_s: int, ended_s: int) -> bool:
    """Whether ``count`` deaths may be one row: the time from ``started_s``, the pod's start, to the last death is not
    longer than ``count`` lives with their back-offs. Each life counts as ``LONG_LIFE_S`` or, if that is longer, as the
    last life. ``started_s`` 0: the start is unknown, and they may."""
    longest_s = max(LONG_LIFE_S, ended_s - began_s) + BACK_OFF_S
    return not started_s or ended_s - started_s <= count * longest_s


def _recounted(now: Death, known: Death | None) -> Death:
    if known is None or not now.cause:
        return now
    new = now.count - known.count
    if new <= 0:
        return replace(now, equal=known.equal)
    if now.begins:
        return replace(now, equal=1)
    return replace(now, equal=known.equal + new if now.cause == known.cause else new)


def _fitted(text: str, *, keep_end: bool = False) -> str:
    """The text in one line, cut to ``MAX_WORDS`` characters. ``keep_end``: cut the beginning, as a log ends with the
    error."""
    line = " | ".join(part for part in map(printable, _COLOUR.sub("", text).splitlines()) if part)
    if len(line) <= MAX_WORDS:
        return line
    return f"... {line[-MAX_WORDS:]}" if keep_end else f"{line[:MAX_WORDS]} ..."


def printable(line: str) -> str:
    """The line without control characters, which a terminal would obey."""
    return " ".join("".join(one if one.isprintable() else " " for one in line).split())
