"""Which worker of a test run gets which file: those that need the same costly thing go to the same workers.

A worker that gets its first file with engines starts a process that imports vLLM, and with its first file for a control
plane an API server with etcd and controllers: seconds of CPU time each. Source of truth of a file's kind: its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from xdist.scheduler import LoadFileScheduling


class Kind(Enum):
    """What a file of tests needs."""

    ENGINES = re.compile(r"\bmark\.engines\b|\bharness: Harness\b")
    CONTROL_PLANE = re.compile(r"\bmark\.control_plane\b|\bcontrol_plane: ControlPlane\b")
    PLAIN = re.compile("")
    """Nothing that costs much."""


FIRST_KINDS: Final = (Kind.ENGINES, Kind.CONTROL_PLANE, Kind.ENGINES, Kind.PLAIN)
"""By worker, and again from the start: engines are more than half of all work."""
_PREFERENCES: Final = (Kind.PLAIN, Kind.ENGINES, Kind.CONTROL_PLANE)
"""What a worker takes when none of its own kind is left. Control planes last: their files are few."""


def kind_of(source: str) -> Kind:
    """The kind of the file with this text."""
    return next(kind for kind in Kind if kind.value.search(source))


def next_file(waiting: Mapping[str, Kind], worker: int) -> str:
    """What a worker takes of the ``waiting`` files: the first of its own kind, else of another."""
    kinds = (FIRST_KINDS[worker % len(FIRST_KINDS)], *_PREFERENCES)
    return next(file for kind in kinds for file, has in waiting.items() if has is kind)


class KindScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist's has no types here
    """Whole files, as with ``--dist loadfile``; which one comes next is ``next_file``'s choice."""

    def __init__(self, config: Any, log: Any) -> None:
        super().__init__(config, log)
        self._kinds: dict[str, Kind] = {}
        """Of each file, once: all of them at each choice were 12 s of CPU in a run."""

    def _assign_work_unit(self, node: Any) -> None:
        waiting = {file: self._kind(file) for file in self.workqueue}
        worker = int(node.gateway.id.removeprefix("gw"))
        self.workqueue.move_to_end(next_file(waiting, worker), last=False)
        super()._assign_work_unit(node)

    def _kind(self, file: str) -> Kind:
        if file not in self._kinds:
            self._kinds[file] = kind_of((self.config.rootpath / file).read_text())
        return self._kinds[file]
