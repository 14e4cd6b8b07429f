"""The LoRA adapters of one worker: which load of each is in use, and the content of each load.

The forward thread says what vLLM has loaded, and looks at files only while vLLM itself reads them. One thread finds
digests (``core/adapters.py``). A lane or a receiver asks for the content and never waits for it.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdcluster_connector.adapter_files import FilesChanged, digest_of, files_of, folder_of
from pdcluster_connector.core.adapters import (
    AdapterLoad,
    AdapterRequest,
    ContentAnswer,
    Digests,
    Files,
    ReadFailure,
    load_of,
)
from pdcluster_connector.ending import left_s

MAX_LOADS: Final = 4096
"""The most adapters whose last load is remembered, beside those that vLLM holds. Others count as not loaded."""
MAX_QUEUED: Final = 1024
"""The most adapters whose files wait to be read. Further ones are asked for again."""
_CLOSE_S: Final = 2.0
_UNSEEN: Final = "it was loaded before the connector could see it: load it again"
_IN_HUB: Final = (
    "vLLM does not hold it, and will take the newest version that it finds in a hub: hold more adapters "
    "(--max-cpu-loras), or serve it from a folder"
)


@dataclass(frozen=True, slots=True)
class _LastLoad:
    load: AdapterLoad
    is_resident: Callable[[], bool]
    """Whether vLLM still holds this adapter, and does not read it again."""


class AdapterLoads:
    """Of one worker process. Any thread; only ``close`` waits."""

    def __init__(self, digest: Callable[[Files], str] = digest_of) -> None:
        self._digest = digest
        self._lock = threading.Lock()
        """Guards ``_digests`` and ``_queued``. Held for a few look-ups."""
        self._digests = Digests()
        self._queued: set[Files] = set()
        self._queue: queue.Queue[Files | None] = queue.Queue(MAX_QUEUED + 1)
        self._loaded: OrderedDict[int, _LastLoad] = OrderedDict()
        """The forward thread writes."""
        self._thread = threading.Thread(target=self._read_all, name="pdcluster-adapters", daemon=True)
        self._thread.start()

    def files_before(self, asked: AdapterRequest) -> Files | None:
        """The files that vLLM is about to read; None: of a name in a hub. Forward thread, while vLLM loads."""
        folder = folder_of(asked.path)
        return (files_of(folder) or Files(folder, ())) if folder else None

    def loaded(
        self, asked: AdapterRequest, before: Files | None, folder: str | None, is_resident: Callable[[], bool]
    ) -> None:
        """vLLM has read the adapter from ``folder``. Forward thread, while vLLM loads."""
        load = load_of(asked, before, files_of(folder) if folder else None)
        self._remember(asked.number, _LastLoad(load, is_resident))
        if load.files is not None and not load.problem:
            with self._lock:
                self._digests.loaded_again(load.files)
            self.content(load)

    def in_step(self, asked: AdapterRequest) -> AdapterLoad:
        """The load with which the step that runs now computes ``asked``. Forward thread."""
        known = self._loaded.get(asked.number)
        if known is None or known.load.name != asked.name:
            return AdapterLoad(asked.name, asked.use, problem=asked.problem or _UNSEEN)
        return known.load

    def at_hand(self, asked: AdapterRequest) -> AdapterLoad:
        """The load with which the next step would compute ``asked``: what vLLM holds, or would read now."""
        known = self._loaded.get(asked.number)
        is_held = known is not None and known.load.name == asked.name and known.is_resident()
        if known is not None and is_held and not asked.is_read_each_step:
            return known.load
        if (folder := folder_of(asked.path)) is None:
            return AdapterLoad(asked.name, asked.use, problem=asked.problem or _IN_HUB)
        return load_of(asked, None, files_of(folder))

    def content(self, load: AdapterLoad) -> ContentAnswer:
        """The content of ``load``. If it is not known its files are read, and a later call tells."""
        with self._lock:
            found = self._digests.content(load)
            if load.files is None or load.problem or not self._is_new(load.files):
                return found
            self._queued.add(load.files)
        self._queue.put_nowait(load.files)
        return found

    def close(self, deadline: float) -> bool:
        """End the thread, which reads no KV: True. Waits 2 s at most, but not beyond ``deadline`` (monotonic seconds).

        A longer read ends with the process.
        """
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return True
        self._thread.join(min(_CLOSE_S, left_s(deadline)))
        return True

    def _remember(self, number: int, last: _LastLoad) -> None:
        """Forgets the oldest load that vLLM does not hold, if there are too many. Other threads look up meanwhile."""
        self._loaded[number] = last
        self._loaded.move_to_end(number)
        spare = (known for known, one in self._loaded.items() if known != number and not one.is_resident())
        if len(self._loaded) > MAX_LOADS and (dropped := next(spare, None)) is not None:
            del self._loaded[dropped]

    def _is_new(self, files: Files) -> bool:
        return files not in self._queued and len(self._queued) < MAX_QUEUED and self._digests.is_wanted(files)

    def _read_all(self) -> None:
        while (files := self._queue.get()) is not None:
            digest, failure = "", ReadFailure("")
            try:
                digest = self._digest(files)
            except FilesChanged as error:
                failure = ReadFailure(str(error))
            except OSError as error:
                failure = ReadFailure(str(error), may_pass=True)
            with self._lock:
                self._queued.discard(files)
                if digest:
                    self._digests.found(files, digest)
                else:
                    self._digests.failed(files, failure)
