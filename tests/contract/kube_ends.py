"""API servers that ``test_kube_api.py`` is run against: the fake and a real kube-apiserver without controllers.

Without, because the suite counts changes of Deployments, and a controller adds its own whenever it comes to it.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from control_plane.accounts import make_account, make_namespace
from control_plane.plane import ControlPlane
from fakes.api_server import ApiServer
from pdcluster_kube.access import KubeAccess


@dataclass(frozen=True)
class ApiEnd:
    """One API server and an empty namespace of it."""

    namespace: str
    access: KubeAccess
    """May do everything in the namespace."""
    router_access: KubeAccess
    """Has a router's rights there and no others."""
    forget_history: Callable[[], None]
    """Versions before the last change are too old for a watch. Open watches may end."""


@asynccontextmanager
async def open_fake() -> AsyncIterator[ApiEnd]:
    api = ApiServer()
    await api.start()
    try:
        yield ApiEnd(api.namespace, KubeAccess(api.url), KubeAccess(api.url), api.forget_history)
    finally:
        await api.stop()


RULES: Final = {
    "operator": {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},
    "router": {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
}


@asynccontextmanager
async def open_real(plane: ControlPlane) -> AsyncIterator[ApiEnd]:
    """The namespace goes at the end. Only the API server's memory holds its history, so a restart forgets it."""
    namespace = make_namespace(plane.admin, "contract")
    with tempfile.TemporaryDirectory() as folder:
        operator, router = (access_of(plane, namespace, name, Path(folder)) for name in ("operator", "router"))
        try:
            yield ApiEnd(namespace, operator, router, plane.restart_api_server)
        finally:
            plane.admin.delete(f"/api/v1/namespaces/{namespace}")


def access_of(plane: ControlPlane, namespace: str, name: str, folder: Path) -> KubeAccess:
    make_account(plane.admin, namespace, name, [RULES[name]])
    token_file = folder / name
    token_file.write_text(plane.token_for(namespace, name))
    return KubeAccess(plane.url, plane.ca_file, token_file)


Open = Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[ApiEnd]]

API_SERVERS: Final[dict[str, Open]] = {
    "fake": lambda _: open_fake(),
    "kube-apiserver": lambda request: open_real(request.getfixturevalue("still_plane")),
}
MARKS: Final = {"kube-apiserver": pytest.mark.control_plane}
