"""API servers that ``test_operator_kube.py`` is run against: the fake, and whoever is added to ``API_SERVERS``.

A real kube-apiserver needs an entry that starts one and makes a namespace; the suite needs nothing else of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from fakes.api_server import ApiServer
from pdcluster_operator.access import KubeAccess


@dataclass(frozen=True)
class ApiEnd:
    """One API server and an empty namespace of it, in which ``access`` may do everything."""

    access: KubeAccess
    namespace: str


@asynccontextmanager
async def open_fake() -> AsyncIterator[ApiEnd]:
    api = ApiServer()
    await api.start()
    try:
        yield ApiEnd(KubeAccess(api.url), "default")
    finally:
        await api.stop()


API_SERVERS: Final[dict[str, Callable[[], AbstractAsyncContextManager[ApiEnd]]]] = {"fake": open_fake}
