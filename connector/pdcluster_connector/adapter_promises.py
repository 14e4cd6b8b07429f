"""The adapters that requests on decode will need as they are now: from their announcement to their first step.

Meanwhile vLLM may drop the adapter for others, and read its files again at that step. If other files have taken their
names by then, vLLM gets the old ones, which were kept open. All ranks hear of a request in the same step, and so do all
of its first step. So they read the same files, whenever the KV of each has come.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pdcluster_connector.adapter_files import OpenFiles, files_of, folder_of, opened
from pdcluster_connector.core.adapters import AdapterLoad, AdapterRequest, Files
from pdcluster_protocol.ids import RequestId

_LOG: Final = logging.getLogger(__name__)


class _PromiseKey(NamedTuple):
    number: int
    name: str
    path: str


@dataclass(slots=True)
class _Promise:
    load: AdapterLoad
    kept: OpenFiles
    requests: set[RequestId] = field(default_factory=set)


class AdapterPromises:
    """Of one worker process. Any thread. A lock is held for a look-up only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._promises: dict[_PromiseKey, _Promise] = {}

    def make(self, request_id: RequestId, asked: AdapterRequest, load: AdapterLoad, kept: OpenFiles | None) -> None:
        """``request_id`` shall decode with ``load``, or with what is promised of the adapter already.

        ``kept``: the files of ``load``, if they are open. If they cannot be opened nothing is promised: they are others
        by now, which a second look finds, or this process is out of descriptors.
        """
        key = _key(asked)
        with self._lock:
            if (promise := self._promises.get(key)) is not None:
                promise.requests.add(request_id)
                return
        kept = kept or (opened(load.files) if load.files else None)
        if kept is not None and not load.problem:
            with self._lock:
                self._promises.setdefault(key, _Promise(load, kept)).requests.add(request_id)

    def release(self, request_id: RequestId) -> None:
        """The first step of the request has begun, or it has ended before."""
        over = []  # closed behind the lock: a network's file system may take its time
        with self._lock:
            for key, promise in list(self._promises.items()):
                promise.requests.discard(request_id)
                if not promise.requests:
                    over.append(self._promises.pop(key))

    def load_of(self, asked: AdapterRequest) -> AdapterLoad | None:
        """The load that is promised of the adapter; None: there is none, or it cannot be kept any more."""
        promise = self._find(asked)
        return promise.load if promise and promise.kept.is_unchanged else None

    def replacement(self, asked: AdapterRequest) -> OpenFiles | None:
        """The files to read in place of those that vLLM would read; None: read these."""
        promise = self._find(asked)
        if promise is None or not promise.kept.is_unchanged or _files_to_be_read(asked) == promise.kept.files:
            return None
        return promise.kept

    def check(self, asked: AdapterRequest, files: Files | None) -> None:
        """vLLM has read ``files``. The log tells of requests that wait for others: nothing can stop them."""
        with self._lock:
            broken = [
                (key, promise)
                for key, promise in self._promises.items()
                if key.number == asked.number and promise.load.files != files
            ]
        for key, promise in broken:
            _LOG.critical(
                "LoRA adapter was read with other files than requests with KV wait for adapter=%s path=%s requests=%d: "
                "their answers mix both; give new weights a new name, or replace files by renaming",
                key.name,
                key.path,
                len(promise.requests),
            )

    def _find(self, asked: AdapterRequest) -> _Promise | None:
        with self._lock:
            return self._promises.get(_key(asked))


def _key(asked: AdapterRequest) -> _PromiseKey:
    return _PromiseKey(asked.number, asked.name, asked.path)


def _files_to_be_read(asked: AdapterRequest) -> Files | None:
    """The files that vLLM would read now; None: of a name in a hub, it does not say."""
    folder = folder_of(asked.path)
    return files_of(folder) if folder else None
