"""What the operator asks of the API server: few calls, each with the precondition that it was decided on.

Every call has a deadline and raises a ``KubeError`` if it was not surely done (``errors.py`` says what helps). Writes
need leadership; a call whose answer was lost may have been done, so each is safe to repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdcluster_operator.kinds import Kind, Object, Ref


@dataclass(frozen=True, slots=True)
class Listed:
    """An object's metadata, as a list shows it."""

    uid: str
    namespace: str
    name: str
    resource_version: str


class Kube(Protocol):
    """One API server. Any number of tasks."""

    async def get(self, ref: Ref) -> Object | None:
        """The object; None when there is none."""
        ...

    async def list_metadata(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Listed]:
        """All of a kind in a namespace, or in the cluster (None), that a label selector chooses."""
        ...

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server knows this kind."""
        ...

    async def create(self, manifest: Object) -> Object:
        """A new object.

        Raises:
            Exists: There is one of this name.
        """
        ...

    async def apply(self, manifest: Object, *, is_forced: bool = False) -> Object:
        """The object is as the manifest says, as far as it says anything (server-side apply).

        ``metadata.uid`` and ``metadata.resourceVersion``, where the manifest has them, are preconditions.
        ``is_forced``: fields that are somebody else's too; only with a uid that was seen to be ours.

        Raises:
            Conflict: They do not hold.
            Taken: A field that differs is somebody else's, and it is not forced.
        """
        ...

    async def ask_create(self, manifest: Object) -> None:
        """The API server would create it now. Nothing is stored (a dry run, with admission and all checks).

        Raises:
            Exists: There is one of this name.
        """
        ...

    async def ask_apply(self, manifest: Object) -> None:
        """The API server would apply it now, by force if need be. Nothing is stored.

        Raises:
            Conflict: The preconditions do not hold.
        """
        ...

    async def apply_status(self, ref: Ref, uid: str, status: Object, *, resource_version: str) -> Object:
        """Its status is this, and nothing else of ours. Forced: status has one writer. Returns the whole object.

        ``resource_version``: of the state that was looked at. A call that arrives late, when another operator leads,
        must not write its old picture over theirs.

        Raises:
            Conflict: It has changed since, or is another one.
        """
        ...

    async def replace(self, manifest: Object) -> Object:
        """The whole object, if its ``metadata.resourceVersion`` is still the newest.

        Raises:
            Conflict: It is not.
        """
        ...

    async def scale(self, ref: Ref, replicas: int, *, resource_version: str) -> str:
        """Its ``spec.replicas`` are these, if nothing of it has changed since. Returns its new resourceVersion.

        Raises:
            Conflict: Something has.
        """
        ...

    async def delete(self, ref: Ref, *, uid: str, resource_version: str = "") -> None:
        """It is gone, or going, if it is still the one with this uid; nothing to do when there is none.

        ``resource_version``: only in this state; empty: in any.

        Raises:
            Conflict: Another one has its name, or it has changed since.
        """
        ...
