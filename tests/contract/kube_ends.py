"""API servers that ``test_kube_api.py`` is run against: the fake and a real kube-apiserver."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import pytest

from control_plane.accounts import make_account, make_namespace
from control_plane.plane import ControlPlane
from fakes.kube_api import FakeKubeApi
from pdcluster_kube.access import KubeAccess


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
    async def forget_history(self) -> None:
        """Versions before the last change are too old for a watch. Open watches may end."""
        ...


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

    async def forget_history(self) -> None:
        self._api.forget_history()


@asynccontextmanager
async def open_fake() -> AsyncIterator[KubeApi]:
    api = FakeKubeApi()
    await api.start()
    try:
        yield FakeEnd(api)
    finally:
        await api.stop()


class RealEnd:
    """A namespace of a real one. The suite reads as a ServiceAccount that has a router's rights and no others."""

    def __init__(self, plane: ControlPlane, namespace: str, access: KubeAccess) -> None:
        self._plane = plane
        self._admin = plane.admin
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self.namespace = namespace
        self.access = access

    async def put(self, one: dict[str, Any]) -> None:
        """Server-side apply: it makes and changes, and takes away what one manager no longer says."""
        whole = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", **one}
        await asyncio.to_thread(self._admin.apply, f"{self._path}/{one['metadata']['name']}", whole)

    async def delete(self, name: str) -> None:
        await asyncio.to_thread(self._admin.delete, f"{self._path}/{name}")

    async def forget_history(self) -> None:
        """Only memory holds it. Blocks the loop: the API server dies with the thread that starts it."""
        self._plane.restart_api_server()


@asynccontextmanager
async def open_real(plane: ControlPlane) -> AsyncIterator[KubeApi]:
    """The namespace goes at the end."""
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    namespace = make_namespace(plane.admin, "contract")
    make_account(plane.admin, namespace, "router", [rule])
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        token_file.write_text(plane.token_for(namespace, "router"))
        try:
            yield RealEnd(plane, namespace, KubeAccess(plane.url, plane.ca_file, token_file))
        finally:
            plane.admin.delete(f"/api/v1/namespaces/{namespace}")


Open = Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[KubeApi]]

API_SERVERS: Final[dict[str, Open]] = {
    "fake": lambda _: open_fake(),
    "kube-apiserver": lambda request: open_real(request.getfixturevalue("control_plane")),
}
MARKS: Final = {"kube-apiserver": pytest.mark.control_plane}
