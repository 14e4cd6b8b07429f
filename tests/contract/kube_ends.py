"""API servers that ``test_kube_api.py`` is run against: the fake, and whoever is added to ``API_SERVERS``.

A real kube-apiserver needs an entry that starts one (or finds one by a kubeconfig), makes a namespace, and writes
slices with its own client; the suite needs nothing else of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Protocol

from fakes.kube_api import FakeKubeApi
from pdcluster_router.kube_client import KubeAccess


class KubeApi(Protocol):
    """One API server and an empty namespace of it."""

    @property
    def namespace(self) -> str: ...
    @property
    def access(self) -> KubeAccess:
        """May list and watch EndpointSlices in the namespace."""
        ...

    async def put(self, one: dict[str, Any]) -> None:
        """Make or replace a slice. It is stored when this returns."""
        ...

    async def delete(self, name: str) -> None: ...


class FakeEnd:
    """The fake, as the suite wants it."""

    def __init__(self, api: FakeKubeApi) -> None:
        self._api = api
        self.namespace = api.namespace
        self.access = KubeAccess(api.url, None, None)

    async def put(self, one: dict[str, Any]) -> None:
        self._api.put(one)

    async def delete(self, name: str) -> None:
        self._api.delete(name)


@asynccontextmanager
async def open_fake() -> AsyncIterator[KubeApi]:
    api = FakeKubeApi()
    await api.start()
    try:
        yield FakeEnd(api)
    finally:
        await api.stop()


API_SERVERS: Final[dict[str, Callable[[], AbstractAsyncContextManager[KubeApi]]]] = {"fake": open_fake}
