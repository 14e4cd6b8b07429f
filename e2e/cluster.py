"""A cluster as its user has it: ``kubectl``, and waiting for what it shows. Of our own node, or any KUBECONFIG's."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from e2e.node import Node

Object = dict[str, Any]

OPERATOR: Final = "pdcluster-operator"
"""Name of its Deployment and its Lease, for a release called pdcluster."""
OPERATOR_NAMESPACE: Final = "pdcluster-system"
CALL_S: Final = 60.0
_POLL_S: Final = 1.0
"""kubectl takes a twentieth of it on a core that engines need."""
_GONE: Final = "NotFound"


class KubectlError(Exception):
    """kubectl did not do what it was told. Says what it said."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """``node``: None when the cluster is not ours. Any thread may call."""

    kubectl: str
    kubeconfig: Path
    node: Node | None = None

    def run(self, *words: str, stdin: str | None = None, limit_s: float = CALL_S) -> str:
        """What kubectl prints.

        Raises:
            KubectlError: It failed, or took longer than ``limit_s``.
        """
        command = [self.kubectl, f"--kubeconfig={self.kubeconfig}", *words]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl {' '.join(words)} took longer than {limit_s:.0f} s") from error
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    @contextmanager
    def forwarding(self, namespace: str, *words: str) -> Iterator[None]:
        """``kubectl port-forward``, from when it forwards to the end of the ``with``.

        Raises:
            KubectlError: It ended before it forwarded anything.
        """
        command = [self.kubectl, f"--kubeconfig={self.kubeconfig}", "-n", namespace, *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as started:
            assert started.stdout is not None
            try:
                said = started.stdout.readline()
                if not said.startswith("Forwarding"):
                    raise KubectlError(f"kubectl {' '.join(words)}: {said}")
                yield
            finally:
                started.kill()

    def apply(self, one: Object) -> None:
        """As ``kubectl apply -f`` of a file with it; JSON is YAML."""
        self.run("apply", "-f", "-", stdin=json.dumps(one))

    def get(self, kind: str, name: str, namespace: str) -> Object:
        found: Object = json.loads(self.run("-n", namespace, "get", kind, name, "-o", "json"))
        return found

    def exists(self, kind: str, name: str, namespace: str) -> bool:
        try:
            self.get(kind, name, namespace)
        except KubectlError as error:
            if _GONE in str(error):
                return False
            raise
        return True

    def items(self, kinds: str, namespace: str, selector: str = "") -> list[Object]:
        """``kinds``: with commas between them."""
        chosen = ["-l", selector] if selector else []
        found: list[Object] = json.loads(self.run("-n", namespace, "get", kinds, *chosen, "-o", "json"))["items"]
        return found

    def wait(self, what: str, condition: str, namespace: str, limit_s: float) -> None:
        """``kubectl wait``; ``what``: KIND/NAME; ``condition``: as behind ``--for=``.

        Raises:
            KubectlError: It does not hold within ``limit_s``.
        """
        words = ("wait", f"--for={condition}", what, f"--timeout={limit_s:.0f}s")
        self.run("-n", namespace, *words, limit_s=limit_s + CALL_S)

    def kill(self, namespace: str, pod: str, container: str) -> None:
        """The container's processes are killed; Kubernetes starts it again in its pod. On a cluster that is not ours
        the pod is deleted without grace instead, for nobody gives us its node."""
        if self.node is None:
            self.run("-n", namespace, "delete", "pod", pod, "--grace-period=0", "--force", "--wait=false")
        else:
            self.node.kill_container(namespace, pod, container)

    def story(self, namespace: str) -> str:
        """What a person would look at when something is wrong: pods, events, the ends of logs."""
        told = [self._told("-n", namespace, "get", "pdclusters,deployments,pods,services", "-o", "wide")]
        told += [self._told("-n", namespace, "get", "events", "--sort-by=.lastTimestamp")]
        for pod in self.items("pods", namespace):
            name = pod["metadata"]["name"]
            told += [f"--- {name}", self._told("-n", namespace, "logs", name, "--tail=15", "--all-containers")]
        return "\n".join(told)

    def _told(self, *words: str) -> str:
        try:
            return self.run(*words)
        except KubectlError as error:
            return str(error)


def eventually(holds: Callable[[], object], what: str | Callable[[], str], limit_s: float) -> None:
    """``what``: is wrong then; a function's is what is wrong at the end.

    Raises:
        TimeoutError: It does not hold within ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what if isinstance(what, str) else what()}, after {limit_s:.0f} s")
        time.sleep(_POLL_S)
