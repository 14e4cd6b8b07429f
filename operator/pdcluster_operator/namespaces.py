"""Finds the namespaces that can be watched, among those that the operator was told.

A namespace may be gone for good, and with it the Role that the chart has put there. kopf 1.45 tells of no object before
it has listed all that it watches, so such a namespace would keep all others waiting. It is left out until it can be
read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pdcluster_operator.errors import Forbidden, Unauthenticated
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import Kind


@dataclass(frozen=True, slots=True)
class FoundNamespaces:
    """``watched``: those where we may list every kind. ``left_out``: those where we may not, each with the refusal."""

    watched: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()


async def find_namespaces(kube: HttpKube, kinds: Collection[Kind], wanted: Iterable[str]) -> FoundNamespaces:
    """Ask in each namespace for one object of each kind.

    Raises:
        Unauthenticated: The API server does not know us.
        ApiUnavailable: It does not answer.
    """
    names = tuple(dict.fromkeys(wanted))
    refusals = await asyncio.gather(*(_refusal(kube, kinds, name) for name in names))
    told = tuple(zip(names, refusals, strict=True))
    return FoundNamespaces(
        tuple(name for name, refusal in told if not refusal),
        tuple((name, refusal) for name, refusal in told if refusal),
    )


async def _refusal(kube: HttpKube, kinds: Collection[Kind], namespace: str) -> str:
    """The API server's refusal in this namespace; empty: it grants all."""
    for kind in kinds:
        try:
            await kube.require_list(kind, namespace)
        except Unauthenticated:
            raise
        except Forbidden as refusal:
            return str(refusal)
    return ""
