"""The adapters that requests on decode will need as they were: their KV is here, and their first step is not.

Meanwhile vLLM may drop the adapter for others, and read its files again at that step. If other files have taken their
names by then, vLLM gets the old ones, which were kept open. So all requests that wait for one adapter get one content.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Final

from pdcluster_connector.adapter_files import OpenFiles, files_of, opened
from pdcluster_connector.core.adapters import AdapterLoad, AdapterRequest
from pdcluster_protocol.ids import RequestId

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class _Promise:
    load: AdapterLoad
    kept: OpenFiles
    requests: set[RequestId] = field(default_factory=set)


class AdapterPromises:
    """Of one worker process. Any thread. A lock is held for a look-up only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_number: dict[int, _Promise] = {}

    def make(self, request_id: RequestId, asked: AdapterRequest, load: AdapterLoad, kept: OpenFiles | None) -> bool:
        """``request_id`` will decode with ``load``. ``kept``: its files, if they are open already.

        Returns False where the files cannot be kept: they are others by now.
        """
        kept = kept or (opened(load.files) if load.files else None)
        if kept is None:
            return False
        with self._lock:
            promise = self._by_number.setdefault(asked.number, _Promise(load, kept))
            promise.requests.add(request_id)
            return promise.load == load

    def release(self, request_id: RequestId) -> None:
        """The first step of the request has begun, or it has ended before."""
        with self._lock:
            for number, promise in list(self._by_number.items()):
                promise.requests.discard(request_id)
                if not promise.requests:
                    del self._by_number[number]

    def load_of(self, asked: AdapterRequest) -> AdapterLoad | None:
        """The load that is promised of the adapter; None: there is none."""
        promise = self._find(asked)
        return promise.load if promise and promise.kept.is_unchanged else None

    def replacement(self, asked: AdapterRequest) -> OpenFiles | None:
        """The files to read in place of those that are in the adapter's folder; None: read these."""
        promise = self._find(asked)
        if promise is None or files_of(promise.kept.files.folder) == promise.kept.files:
            return None
        if promise.kept.is_unchanged:
            return promise.kept
        _LOG.critical(
            "LoRA adapter was written over while requests waited with KV of what it held adapter=%s folder=%s "
            "requests=%d: their answers mix both; replace its files by renaming",
            asked.name,
            promise.kept.files.folder,
            len(promise.requests),
        )
        return None

    def _find(self, asked: AdapterRequest) -> _Promise | None:
        with self._lock:
            promise = self._by_number.get(asked.number)
        return promise if promise and promise.load.name == asked.name else None
