"""A real API server with the chart's objects in it, and the operator as a process of its own, with the chart's flags.

    etcd <- kube-apiserver <- operator: the chart's ServiceAccount, rights and arguments
                           <- this program: user and kubelet, as administrator

The controller manager is stopped (SIGSTOP): its client is limited to 20 writes a second, so a run would measure it.
``kubelet.py`` does its work for Deployments. EndpointSlices, ReplicaSets and garbage collection are missing.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
from benchmarks.operator_figures import Counts, Usage, parse_counts

from pdcluster_kube.access import KubeAccess

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from chart_cases.rendering import NAMESPACE, objects  # after the path is set
from control_plane.binaries import find_binaries
from control_plane.children import Child
from control_plane.crds import apply_crds, wait_established
from control_plane.plane import ControlPlane

START_LIMIT_S: Final = 60.0

_MADE_BY_CHART: Final = frozenset({"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"})
_SERVES: Final = re.compile(r"serving probes and metrics port=(\d+)")
_LEADS: Final = re.compile(r"^pdcluster_operator_leading 1", re.MULTILINE)
_POLL_S: Final = 0.1


@contextmanager
def running_plane(folder: Path) -> Iterator[ControlPlane]:
    """A control plane runs whose controller manager is stopped. ``folder``: empty."""
    with ControlPlane(find_binaries(os.environ), folder) as plane:
        os.kill(plane.pids()["controller-manager"], signal.SIGSTOP)
        yield plane


def make_namespace(plane: ControlPlane, name: str) -> None:
    plane.admin.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})


def admin_access(plane: ControlPlane, folder: Path) -> KubeAccess:
    """The administrator's access, in the form that the operator's sessions take."""
    return KubeAccess(plane.url, plane.ca_file, _private_file(folder / "admin-token", plane.admin.token))


def install_chart(plane: ControlPlane) -> None:
    """CRDs, ServiceAccount and rights of the default chart; ``OperatorProcess`` stands in for its Deployment."""
    apply_crds(plane.admin)
    wait_established(plane.admin)
    make_namespace(plane, NAMESPACE)
    for one in objects("default"):
        is_test = "helm.sh/hook" in (one["metadata"].get("annotations") or {})
        if one["kind"] in _MADE_BY_CHART and not is_test:
            plane.admin.create(_path_of(one), one)


class OperatorProcess:
    """The operator, with the arguments of the chart's Deployment. The owner of this object kills it."""

    def __init__(self, plane: ControlPlane, folder: Path, router_port: int) -> None:
        """Starts the operator. ``install_chart`` comes before. ``router_port``: where it asks routers to verify."""
        pod = next(one for one in objects("default") if one["kind"] == "Deployment")["spec"]["template"]["spec"]
        token = plane.token_for(NAMESPACE, pod["serviceAccountName"])
        where = [
            f"--kube-api={plane.url}",
            f"--kube-ca-file={plane.ca_file}",
            f"--kube-token-file={_private_file(folder / 'operator-token', token)}",
            "--host=127.0.0.1",
            "--port=0",  # the last --port counts
        ]
        program = str(Path(__file__).with_name("service_names.py"))
        # -P: Python looks for no modules in this folder.
        command = [sys.executable, "-P", program, f"--router-port={router_port}", *pod["containers"][0]["args"], *where]
        self._child = Child(command, folder / "operator.log")

    @property
    def pid(self) -> int:
        return self._child.pid

    async def wait_until_leading(self, session: aiohttp.ClientSession) -> None:
        """
        Raises:
            TimeoutError: The operator does not lead within ``START_LIMIT_S``.
            ChildError: Its process has ended.
        """
        async with asyncio.timeout(START_LIMIT_S):
            while not await self._leads(session):
                self._child.check()
                await asyncio.sleep(_POLL_S)

    async def read_counts(self, session: aiohttp.ClientSession) -> Counts:
        return parse_counts(await self._page(session))

    def kill(self) -> None:
        self._child.kill()

    async def _leads(self, session: aiohttp.ClientSession) -> bool:
        if not _SERVES.search(self._child.log_file.read_text()):
            return False
        async with session.get(f"{self._url}/readyz") as response:
            is_ready = response.status == 200
        return is_ready and bool(_LEADS.search(await self._page(session)))

    async def _page(self, session: aiohttp.ClientSession) -> str:
        async with session.get(f"{self._url}/metrics") as response:
            return await response.text()

    @property
    def _url(self) -> str:
        found = _SERVES.search(self._child.log_file.read_text())
        assert found, "it serves nothing yet"
        return f"http://127.0.0.1:{found[1]}"


def read_usage(pid: int) -> Usage:
    """CPU time and memory of a process. Source of truth: proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    resident, peak = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return Usage((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), resident, peak)


def _path_of(one: dict[str, Any]) -> str:
    """The path of all objects of its kind. All kinds of ``_MADE_BY_CHART`` have regular plurals."""
    version, namespace = one["apiVersion"], one["metadata"].get("namespace")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}{f'/namespaces/{namespace}' if namespace else ''}/{one['kind'].lower()}s"


def _private_file(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path
