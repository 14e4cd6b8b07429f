"""Errors of the API server, or of the way to it, sorted by what helps.

KubeError
  Conflict       what we read is old: read again, decide again
    Exists       there is one of this name already
    OwnConflict  a field differs that we ourselves wrote another way
  NotFound       there is none, or no longer
  Forbidden      we lack the right: the chart's roles have to be mended
  Refused        the server refuses what we wrote: our user, or we, wrote something wrong
    Taken        a field has another owner: to be forced only where the object is ours
  ApiUnavailable no answer, or not now: try again later
  Contested    somebody sets a field of ours again and again: it is set back, later and later
  NotLeader      we may no longer act; nothing was sent
"""

from __future__ import annotations

from pdcluster_protocol.errors import PDClusterError, Unavailable


class KubeError(PDClusterError):
    """Something was asked of the API server and not done, or not surely done."""


class Conflict(KubeError):
    """The object has changed since we read it."""


class Exists(Conflict):
    """There is an object of this name already."""


class OwnConflict(Conflict):
    """An apply would change fields that only we own, but from a create or a scale. No harm if the picture is new."""


class NotFound(KubeError):
    """There is no such object, or no such kind."""


class Forbidden(KubeError):
    """We lack the right, or are not known. The message names verb and resource."""


class Refused(KubeError):
    """The API server checked what we wrote and said no. Writing it again cannot help."""


class Taken(Refused):
    """Somebody else owns a field that we would change. ``fields`` as the API server spells them; ``by``: the managers
    that have them."""

    def __init__(self, message: str, fields: tuple[str, ...] = (), by: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields
        self.by = by


class Contested(KubeError):
    """A field of ours was taken back, and a moment ago too: all is done, and the next look comes later and later."""


class ApiUnavailable(KubeError, Unavailable):
    """No answer, a 429 or a 5xx. ``retry_after_s``: what the server asked for; 0 when it did not."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotLeader(KubeError):
    """Our time as leader is over: the request was not sent."""
