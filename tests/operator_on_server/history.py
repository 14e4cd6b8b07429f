"""Every state that a pool's pods were ever in, in the API server's own order: by a watch, so nothing is missing.

What a user of the pool had at each moment: how many engines there were, how many of them ready, of which revisions.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from control_plane.kube_http import KubeHttp, Object
from operator_on_server.node import is_ready
from patience import PATIENCE_S
from pdcluster_protocol import labels

_ROLES: Final = ("prefill", "decode")
_LIMIT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Moment:
    """``there``: pods by role, those that terminate too. ``ready``: by role and revision, without those."""

    there: Counter[str]
    ready: Counter[tuple[str, str]]

    def num_ready(self, role: str) -> int:
        """Of any revision."""
        return sum(count for (of, _), count in self.ready.items() if of == role)

    @property
    def serving(self) -> set[str]:
        """Revisions that have a ready engine of each role: only those can answer."""
        of = {role: {revision for was, revision in self.ready if was == role} for role in _ROLES}
        return of["prefill"] & of["decode"]


class PodHistory:
    """Of one namespace, from now on. One thread; ``close`` joins it, and then ``moments`` is complete."""

    def __init__(self, admin: KubeHttp, namespace: str) -> None:
        """It watches."""
        self._pods: dict[str, Object] = {}
        self.moments: list[Moment] = []
        self.error: Exception | None = None
        path = f"/api/v1/namespaces/{namespace}/pods"
        listed = admin.get(path)
        for pod in listed["items"]:
            self._pods[pod["metadata"]["uid"]] = pod
        self._note()
        parts = urlsplit(admin.url)
        context = ssl.create_default_context(cafile=admin.ca_file)
        self._connection = http.client.HTTPSConnection(parts.netloc, timeout=_LIMIT_S, context=context)
        version = listed["metadata"]["resourceVersion"]
        target = f"{path}?watch=1&resourceVersion={version}&timeoutSeconds={_LIMIT_S:.0f}"
        self._connection.request("GET", target, headers={"authorization": f"Bearer {admin.token}"})
        self._stream = self._connection.getresponse()
        assert self._stream.status == 200, self._stream.status
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pod history", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is noted any more.

        Raises:
            AssertionError: The watch had ended before, so something may be missing.
        """
        assert self._thread.is_alive(), self.error or "the watch has ended by itself"
        self._is_closed = True
        # Wakes the thread out of its read; a close would wait for it.
        self._connection.sock.shutdown(2)
        self._thread.join(PATIENCE_S)
        self._connection.close()

    def _run(self) -> None:
        try:
            for line in self._stream:
                self._take(json.loads(line))
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.error = None if self._is_closed else error

    def _take(self, event: dict[str, Any]) -> None:
        pod = event["object"]
        assert event["type"] in ("ADDED", "MODIFIED", "DELETED"), event
        self._pods[pod["metadata"]["uid"]] = pod
        if event["type"] == "DELETED":
            del self._pods[pod["metadata"]["uid"]]
        self._note()

    def _note(self) -> None:
        there: Counter[str] = Counter()
        ready: Counter[tuple[str, str]] = Counter()
        for pod in self._pods.values():
            own = pod["metadata"].get("labels") or {}
            if labels.ROLE in own:
                there[own[labels.ROLE]] += 1
                ready[own[labels.ROLE], own[labels.REVISION]] += is_ready(pod)
        self.moments.append(Moment(there, +ready))
