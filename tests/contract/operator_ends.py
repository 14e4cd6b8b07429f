"""API servers that ``test_operator_kube.py`` is run against: the fake and a real kube-apiserver without controllers.

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


@asynccontextmanager
async def open_real(plane: ControlPlane) -> AsyncIterator[ApiEnd]:
    """The namespace goes at the end."""
    namespace = make_namespace(plane.admin, "contract")
    everything = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    make_account(plane.admin, namespace, "operator", [everything])
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        token_file.write_text(plane.token_for(namespace, "operator"))
        try:
            yield ApiEnd(KubeAccess(plane.url, plane.ca_file, token_file), namespace)
        finally:
            plane.admin.delete(f"/api/v1/namespaces/{namespace}")


Open = Callable[[pytest.FixtureRequest], AbstractAsyncContextManager[ApiEnd]]

API_SERVERS: Final[dict[str, Open]] = {
    "fake": lambda _: open_fake(),
    "kube-apiserver": lambda request: open_real(request.getfixturevalue("still_plane")),
}
MARKS: Final = {"kube-apiserver": pytest.mark.control_plane}
