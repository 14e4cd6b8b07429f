"""One node with everything that makes it a cluster, inside a box (``box.py``): programs, links, images.

ControlPlane (tests/control_plane)   etcd, API server, controller manager
Node                                 scheduler, containerd, kubelet, kube-proxy, DNS
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from control_plane.binaries import find_binaries, find_programs
from control_plane.children import Child, ChildError
from control_plane.kube_http import KubeHttp
from control_plane.plane import SERVICE_RANGE, ControlPlane
from control_plane.recipe import KUBE_PROXY, KUBECTL, KUBELET, NODE, SCHEDULER
from e2e import node_files
from e2e.archive import Image, write_archive
from e2e.node_files import NODE_ADDRESS, NODE_LINK, NodePlaces

READY_S: Final = 120.0
"""From the kubelet's start until the node is ready; a few seconds on an idle machine."""
COMMAND_S: Final = 120.0
_POLL_S: Final = 0.2
_CONTAINERS: Final = "k8s.io"
"""containerd's namespace for what the kubelet runs."""


class Node:
    """A running cluster of one node. One thread owns it."""

    def __init__(self, folder: Path, images: Sequence[Image]) -> None:
        """Nothing runs yet. ``folder``: new and empty; everything goes there. ``images``: that pods may name."""
        self._folder = folder
        self._images = images
        self._programs = find_programs(os.environ, NODE)
        (folder / "plane").mkdir()
        self.plane = ControlPlane(find_binaries(os.environ), folder / "plane", node_address=NODE_ADDRESS)
        self._places = NodePlaces(folder, self.plane.kubeconfig_file, self.plane.ca_file)
        self._children: list[Child] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """The node is ready for pods.

        Raises:
            ChildError: A program died, or something was not ready in time.
        """
        try:
            self._write_files()
            self._add_links()
            self._stack.enter_context(self.plane)
            self._stack.callback(self._kill_children)
            self._start("containerd", node_files.containerd_command(self._places))
            self._wait("containerd", self._containerd_answers)
            for image in self._images:
                self._import(image)
            self._start_programs()
            self._wait("the node", self._is_ready)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """All programs have ended. Pods may live: they end with the box."""
        self._stack.close()

    @property
    def admin(self) -> KubeHttp:
        return self.plane.admin

    @property
    def kubeconfig(self) -> Path:
        return self.plane.kubeconfig_file

    @property
    def kubectl(self) -> Path:
        return self._programs[KUBECTL]

    def kill_container(self, namespace: str, pod: str, container: str) -> None:
        """SIGKILL to all its processes, as the kernel would when memory is out.

        Raises:
            LookupError: No such container runs.
        """
        wanted = {"pod.namespace": namespace, "pod.name": pod, "container.name": container}
        filters = ",".join(f'labels."io.kubernetes.{name}"=={value}' for name, value in wanted.items())
        found = self._ctr("containers", "ls", "-q", filters).split()
        running = self._ctr("tasks", "ls", "-q").split()
        killed = [one for one in found if one in running]
        if not killed:
            raise LookupError(f"no container {container} runs in {namespace}/{pod}")
        for one in killed:
            self._ctr("tasks", "kill", "--all", "--signal", "SIGKILL", one)

    def _write_files(self) -> None:
        for folder in (self._places.cni, self._places.kubelet, self._places.containerd):
            folder.mkdir()
        texts: Mapping[Path, str] = {
            self._folder / "containerd.toml": node_files.containerd_config(self._places),
            self._folder / "kubelet.json": node_files.kubelet_config(self._places),
            self._folder / "resolv.conf": "",
            self._folder / "token": self.admin.token,
            self._places.cni / "10-pdcluster.conflist": node_files.cni_config(),
        }
        for path, text in texts.items():
            path.write_text(text)

    def _add_links(self) -> None:
        """The node's address, and a way to Services: the kernel looks for a route before kube-proxy's rules apply."""
        for words in (
            f"link add {NODE_LINK} type bridge",
            f"address add {NODE_ADDRESS}/32 dev {NODE_LINK}",
            f"link set {NODE_LINK} up",
            f"route add {SERVICE_RANGE} dev {NODE_LINK} src {NODE_ADDRESS}",
        ):
            _output_of(["ip", *words.split()])

    def _start_programs(self) -> None:
        plane, programs = self.plane, self._programs
        dns = [sys.executable, "-P", str(Path(__file__).with_name("dns.py"))]
        self._start("dns", [*dns, NODE_ADDRESS, plane.url, str(plane.ca_file), str(self._folder / "token")])
        self._start("scheduler", node_files.scheduler_command(programs[SCHEDULER], self._places))
        self._start("kubelet", node_files.kubelet_command(programs[KUBELET], self._places))
        self._start("kube-proxy", node_files.proxy_command(programs[KUBE_PROXY], self._places))

    def _start(self, name: str, command: Sequence[str]) -> None:
        program = command[0] if "/" in command[0] else _found(command[0])
        self._children.append(Child([program, *command[1:]], self._folder / f"{name}.log"))

    def _wait(self, what: str, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_S
        while not is_ready():
            for child in self._children:
                child.check()
            if time.monotonic() > deadline:
                raise ChildError(f"{what} was not ready within {READY_S:.0f} s: see the logs in {self._folder}")
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        answer = self.admin.ask("GET", f"/api/v1/nodes/{node_files.NODE}")
        if answer.status != HTTPStatus.OK:
            return False
        conditions = answer.body.get("status", {}).get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def _containerd_answers(self) -> bool:
        return subprocess.run([*self._ctr_command, "version"], capture_output=True, timeout=COMMAND_S).returncode == 0

    def _import(self, image: Image) -> None:
        """Straight into containerd: no registry."""
        command = [*self._ctr_command, "images", "import", "-"]
        with (self._folder / "import.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
            assert process.stdin is not None
            with process.stdin as pipe:
                write_archive(image, pipe)
        if process.wait(COMMAND_S) != 0:
            raise ChildError(f"{image.name} could not be imported: {(self._folder / 'import.log').read_text()[-500:]}")

    def _ctr(self, *words: str) -> str:
        return _output_of([*self._ctr_command, *words])

    @property
    def _ctr_command(self) -> list[str]:
        return ["ctr", "--address", str(self._places.socket), "--namespace", _CONTAINERS]

    def _kill_children(self) -> None:
        for child in reversed(self._children):
            child.kill()


def _found(program: str) -> str:
    return _output_of(["sh", "-c", f"command -v {program}"]).strip()


def _output_of(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode != 0:
        raise ChildError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
