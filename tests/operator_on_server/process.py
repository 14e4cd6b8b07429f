"""``pdcluster operator`` as a process of its own, with the chart's account, rights and arguments."""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from chart_cases.rendering import NAMESPACE, ROOT
from control_plane.audit import token_id_of
from control_plane.children import Child, ChildError
from control_plane.plane import ControlPlane
from integration.harness import eventually
from operator_on_server.chart import ACCOUNT
from patience import PATIENCE_S

START_LIMIT_S: Final = PATIENCE_S
QUICK: Final = ("--lease-duration=6", "--lease-renew=4.5", "--lease-retry=0.5")
"""A dead leader is followed in seven seconds. Everything else is as users have it."""

_SERVES: Final = re.compile(r"serving probes and metrics port=(\d+)")


class OperatorProcess:
    """One replica. Its owner kills it."""

    def __init__(
        self,
        plane: ControlPlane,
        folder: Path,
        identity: str,
        args: Sequence[str],
        *,
        url: str = "",
        is_on_a_laptop: bool = False,
    ) -> None:
        """It starts. ``args``: of the chart and ``service_names``. ``url``: of a proxy in front of the API server.
        ``is_on_a_laptop``: it is told of the API server by a kubeconfig whose exec plugin gives the token."""
        self.identity = identity
        token, text = folder / f"{identity}.token", plane.token_for(NAMESPACE, ACCOUNT)
        token.touch(mode=0o600)
        token.write_text(text)
        self.token_id = token_id_of(text)
        """It has a token of its own, so the audit log tells it from other replicas."""
        where = [f"--kube-api={url or plane.url}", f"--kube-ca-file={plane.ca_file}", f"--kube-token-file={token}"]
        if is_on_a_laptop:
            where = [f"--kubeconfig={write_kubeconfig(folder, plane, token)}", "--context=laptop"]
        own = [f"--identity={identity}", "--host=127.0.0.1", "--port=0"]  # the last one counts
        program = ROOT / "benchmarks" / "service_names.py"
        command: list[str | Path] = [sys.executable, "-P", program, *QUICK, *args, *where, *own]
        self._child = Child(command, folder / f"{identity}.log")

    @property
    def pid(self) -> int:
        return self._child.pid

    def log(self) -> str:
        return self._child.log_file.read_text(errors="replace")

    def check(self) -> None:
        """Raises ChildError: it has ended."""
        self._child.check()

    def has_ended(self) -> bool:
        """By itself."""
        try:
            self.check()
        except ChildError:
            return True
        return False

    def wait_until(self, page: str, line: str = "") -> None:
        """A page of it answers 200 and shows the line.

        Raises:
            ChildError: It has ended.
            AssertionError: Not within ``START_LIMIT_S``.
        """
        assert eventually(lambda: self._shows(page, line), timeout_s=START_LIMIT_S), self.log()[-2000:]

    def wait_ready(self) -> None:
        self.wait_until("readyz")

    def wait_leading(self) -> None:
        self.wait_ready()
        self.wait_until("metrics", "pdcluster_operator_leading 1")

    def check_alive(self) -> None:
        """It runs, and as the kubelet's liveness probe says, there is nothing that only a restart could mend.

        Raises:
            AssertionError: There is; or no answer in time, three times.
        """
        tries = [self._read("healthz") for _ in range(3)]
        assert any(tries), self.log()[-3000:]

    def kill(self) -> None:
        """SIGKILL."""
        self._child.kill()

    def page(self, page: str) -> str:
        """Empty: it does not answer."""
        return self._read(page) or ""

    def _shows(self, page: str, line: str) -> bool:
        found = self._read(page)
        return found is not None and line in found

    def _read(self, page: str) -> str | None:
        """None: it does not answer, or not with 200."""
        self.check()
        found = _SERVES.search(self.log())
        if not found:
            return None
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/{page}", timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:  # URLError is one, and so is a timeout
            return None


def write_kubeconfig(folder: Path, plane: ControlPlane, token_file: Path) -> Path:
    """One that gets its token of an exec plugin, as those of managed clusters do."""
    version = "client.authentication.k8s.io/v1"
    told = f'{{"apiVersion": "{version}", "kind": "ExecCredential", "status": {{"token": "%s"}}}}'
    script = f"printf '{told}' \"$(cat {token_file})\""
    user = {"exec": {"apiVersion": version, "command": "sh", "args": ["-c", script]}}
    document = {
        "clusters": [{"name": "k", "cluster": {"server": plane.url, "certificate-authority": str(plane.ca_file)}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "laptop", "context": {"cluster": "k", "user": "u"}}],
        "current-context": "another",
    }
    path = folder / "laptop.kubeconfig"
    path.write_text(json.dumps(document))
    return path
