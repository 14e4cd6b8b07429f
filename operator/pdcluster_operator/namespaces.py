"""Finds the namespaces that can be watched, among those that the operator was told.

A namespace may be gone for good, and with it the Role that the chart has put there. kopf 1.45 tells of no object before
it has listed all that it watches, so such a namespace would keep all others waiting. It is left out until it can be
read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from pdcluster_operator.errors import Forbidden
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import PDCLUSTER

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundNamespaces:
    """``watched``: those whose PDClusters the API server lists for us. ``left_out``: those where it refuses that."""

    watched: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


async def find_namespaces(kube: HttpKube, wanted: Iterable[str]) -> FoundNamespaces:
    """Ask for the PDClusters of each namespace.

    Raises:
        Forbidden: All refuse: our rights or our token are at fault, not a namespace.
        ApiUnavailable: The API server does not answer.
    """
    watched: list[str] = []
    refusals: dict[str, Forbidden] = {}
    for namespace in wanted:
        try:
            await kube.list_metadata(PDCLUSTER, namespace)
        except Forbidden as refusal:
            refusals[namespace] = refusal
        else:
            watched.append(namespace)
    if refusals and not watched:
        raise next(iter(refusals.values()))
    for namespace, reason in refusals.items():
        logger.warning("namespace left out until it can be read namespace=%s reason=%s", namespace, reason)
    return FoundNamespaces(tuple(watched), tuple(refusals))


async def readable_one(kube: HttpKube, namespaces: Iterable[str]) -> str | None:
    """The first of these namespaces that can be read; None: none can.

    Raises:
        ApiUnavailable: The API server does not answer.
    """
    for namespace in namespaces:
        try:
            await kube.list_metadata(PDCLUSTER, namespace)
        except Forbidden:
            continue
        return namespace
    return None
