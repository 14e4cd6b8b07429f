"""Maps a status code of the API server to an error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pdcluster_operator.errors import (
    ApiUnavailable,
    Conflict,
    Exists,
    Forbidden,
    KubeError,
    NotFound,
    OwnConflict,
    Refused,
    Taken,
    Unauthenticated,
)
from pdcluster_protocol.labels import MANAGER

_MAX_QUOTED: Final = 1000
_UID: Final = "metadata.uid"
"""If an apply names a uid, and another object has the name by now, Kubernetes 1.35 calls this field immutable."""
_CONFLICT_WITH: Final = re.compile(r'conflict with "([^"]*)"')
_TRY_AGAIN: Final = frozenset({408, 410, 425, 429})
"""410: a page of a list has expired; the caller's next list begins anew."""
_REFUSALS: Final[Mapping[int, type[KubeError]]] = {401: Unauthenticated, 403: Forbidden}


def error_of(what: str, status: int, body: Mapping[str, Any] | None, raw: bytes, retry_after: str) -> KubeError:
    """The error that an answer means. ``body``: a Status if the API server itself answered; None: no JSON object.
    ``retry_after``: value of the header, or empty."""
    said = body.get("message", "") if body else raw[:_MAX_QUOTED].decode("utf-8", "replace")
    message = f"{what}: {status} {str(said)[:_MAX_QUOTED]}".rstrip()
    if status < 300 or status >= 500 or status in _TRY_AGAIN:
        return ApiUnavailable(message, _seconds(retry_after))
    if status == 409:
        return _conflict(message, body or {})
    if status == 422 and any(cause.get("field") == _UID for cause in _causes(body or {})):
        return Conflict(message)
    if status == 404:
        return NotFound(message)
    return _REFUSALS.get(status, Refused)(message)


def _conflict(message: str, body: Mapping[str, Any]) -> KubeError:
    if body.get("reason") == "AlreadyExists":
        return Exists(message)
    fields = [cause for cause in _causes(body) if cause.get("reason") == "FieldManagerConflict"]
    others = [cause for cause in fields if not str(cause.get("message", "")).startswith(f'conflict with "{MANAGER}"')]
    if not others:
        return OwnConflict(message) if fields else Conflict(message)
    told = ", ".join(f"{cause.get('field')} ({cause.get('message')})" for cause in others)
    is_told = all(str(cause.get("field")) in message for cause in others)
    cure = f"{MANAGER} sets this too: leave it to us, or say what you want in the PDCluster"
    return Taken(
        f"{message if is_told else f'{message}: {told}'}; {cure}",
        fields=tuple(sorted({str(cause.get("field")) for cause in others})),
        by=tuple(sorted({_manager_in(str(cause.get("message", ""))) for cause in others})),
    )


def _manager_in(message: str) -> str:
    """``conflict with "kubectl" with subresource "scale" using apps/v1`` -> ``kubectl``."""
    found = _CONFLICT_WITH.match(message)
    return found[1] if found else message


def _causes(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (body.get("details") or {}).get("causes") or ()


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.isdecimal() else 0.0
