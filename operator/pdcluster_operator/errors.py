"""Errors of the API server, or of the way to it, sorted by what helps.

KubeError
  Conflict       our picture is old: read again, decide again
    Exists       an object of this name is there already
    OwnConflict  a field has another value, which we ourselves set by a create or a scale
  NotFound       the object or its kind is not there, or no longer
  Forbidden      we lack the right: mend the chart's roles
    Unauthenticated  the server does not know us
  Refused        the server refuses our write: the spec or our manifest is wrong
    Taken        a field has another owner: force the write only if the object is ours
  ApiUnavailable no answer, or not now: try again later
  Contested      somebody keeps setting a field of ours: set it back after longer and longer waits
  NotLeader      we may no longer act; nothing was sent
"""

from __future__ import annotations

from pdcluster_protocol.errors import PDClusterError, Unavailable


class KubeError(PDClusterError):
    """The API server did not do what we asked, or we cannot know whether it did."""


class Conflict(KubeError):
    """The object has changed since we read it."""


class Exists(Conflict):
    """There is an object of this name already."""


class OwnConflict(Conflict):
    """An apply would change fields that we own from a create or a scale of ours. Harmless if our picture is new."""


class NotFound(KubeError):
    """There is no such object, or no such kind."""


class Forbidden(KubeError):
    """We lack the right, or the server does not know us. The message names method and path."""


class Unauthenticated(Forbidden):
    """The server does not know us: our token or certificate is no good, whatever we ask for."""


class Refused(KubeError):
    """The API server checked what we wrote and said no. Writing it again cannot help."""


class Taken(Refused):
    """Somebody else owns a field that we would change. ``fields``: as the API server spells them; ``by``: the managers
    that own them."""

    def __init__(self, message: str, fields: tuple[str, ...] = (), by: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields
        self.by = by


class Contested(KubeError):
    """We have set back the same field twice within a minute. The plan is carried out; the next look comes later."""


class ApiUnavailable(KubeError, Unavailable):
    """No answer, no JSON, or a status such as 429 or 5xx. ``retry_after_s``: what the server asked for, or 0."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotLeader(KubeError):
    """We do not lead, or no longer, so the request was not sent."""
