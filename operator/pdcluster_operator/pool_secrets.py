"""Reads the pools' Secrets: whether they are there, and the values in them.

Each Secret is read by name. Secrets are not watched: the right to list them is the right to read all of a namespace.
"""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass

from pdcluster_operator.clock import steady_s
from pdcluster_operator.errors import NotFound
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import Ref


@dataclass(frozen=True, slots=True)
class _Sight:
    owner_uid: str
    at: float


class PoolSecrets:
    """Believes for ``believe_s`` seconds that a Secret which was there still is there. Keeps no value of a Secret."""

    def __init__(self, kube: HttpKube, *, believe_s: float) -> None:
        self._kube = kube
        self._believe_s = believe_s
        self._seen: dict[Ref, _Sight] = {}
        self._had: dict[tuple[Ref, str], float] = {}

    async def is_there(self, ref: Ref, owner_uid: str) -> bool:
        """Whether the Secret is there and belongs to this owner."""
        seen = self._seen.get(ref)
        if seen and seen.owner_uid == owner_uid and steady_s() < seen.at + self._believe_s:
            return True
        self._seen.pop(ref, None)
        found = await self._kube.get(ref)
        owners = (found or {}).get("metadata", {}).get("ownerReferences") or ()
        if not any(owner["uid"] == owner_uid for owner in owners):
            return False
        self._seen[ref] = _Sight(owner_uid, steady_s())
        return True

    async def lacks(self, ref: Ref, key: str) -> str:
        """The problem of a user's Secret, for people; empty: the Secret has this key."""
        if steady_s() < self._had.get((ref, key), -self._believe_s) + self._believe_s:
            return ""
        try:
            await self.read(ref, key)
        except NotFound as error:
            return str(error)
        self._had[ref, key] = steady_s()
        return ""

    async def read(self, ref: Ref, key: str) -> str:
        """The Secret's value under ``key``.

        Raises:
            NotFound: There is no such Secret, or no such key in it.
        """
        found = await self._kube.get(ref)
        data = (found or {}).get("data") or {}
        if key not in data:
            raise NotFound(f"{ref} has no key {key}" if found else f"there is no {ref}")
        return b64decode(data[key]).decode("utf-8", "surrogateescape")
