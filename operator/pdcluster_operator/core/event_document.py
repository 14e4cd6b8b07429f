"""A Kubernetes Event as JSON: what ``kubectl describe`` shows of a PDCluster's changes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from pdcluster_operator.core.status import Event
from pdcluster_operator.core.views import View
from pdcluster_operator.kinds import EVENT
from pdcluster_protocol.labels import MANAGER

MAX_MESSAGE: Final = 1024
"""What the newer API of Events allows; the whole is in the condition."""
_MAX_NAME: Final = 253


def event_document(event: Event, about: View, identity: str, now: int, suffix: str) -> dict[str, Any]:
    """``identity``: which of the operator's replicas says so. ``suffix``: makes the name its own."""
    at = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ref = about.ref
    name = f"{ref.name[: _MAX_NAME - len(suffix) - 1]}.{suffix}"
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"name": name, "namespace": ref.namespace},
        "involvedObject": {
            "apiVersion": ref.kind.api_version,
            "kind": ref.kind.name,
            "namespace": ref.namespace,
            "name": ref.name,
            "uid": about.uid,
        },
        "type": event.kind.value,
        "reason": event.reason,
        "message": event.message[:MAX_MESSAGE],
        "source": {"component": MANAGER, "host": identity},
        "reportingComponent": MANAGER,
        "reportingInstance": identity[:128],
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
