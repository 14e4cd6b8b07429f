"""A real Kubernetes control plane on 127.0.0.1: etcd, API server, controller manager. No node: pods stay Pending.

    tests ---- TLS, token ----> kube-apiserver ----> etcd (data in a new folder, no fsync)
                                      ^
                 kube-controller-manager (deployments, garbage collection, service accounts, EndpointSlices, ...)

RBAC decides, nobody is anonymous, no feature gate is touched. A user is the administrator or a ServiceAccount, whose
token is asked for as a kubelet would. All three die with the thread that started them.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from control_plane.audit import AUDIT_POLICY
from control_plane.binaries import Binaries
from control_plane.certificates import write_keys
from control_plane.children import Child, ChildError, ReservedPort
from control_plane.kube_http import KubeHttp
from patience import PATIENCE_S

START_LIMIT_S: Final = PATIENCE_S
"""For each of the programs; on an idle machine of two cores all three take some four seconds."""
TOKEN_LIFE_S: Final = 24 * 3600

_POLL_S: Final = 0.05


SERVICE_RANGE: Final = "10.96.0.0/16"
SERVICE_ADDRESS: Final = "10.96.0.1"
"""The first of the range is the API server's own Service."""


class ControlPlane:
    """One control plane. One thread owns it; ``url``, ``admin`` and the files may be used from any."""

    def __init__(
        self, binaries: Binaries, folder: Path, *, node_address: str = "", admission: Sequence[str] = ()
    ) -> None:
        """Nothing runs yet. ``folder`` is empty; data, keys and logs (``*.log``) go there and stay.

        ``admission``: plugins that are off by default.

        ``node_address``: of this machine, when it is to be a node: then pods reach the API server there, and it reaches
        the kubelet. Empty: only 127.0.0.1 can call it.
        """
        self._binaries = binaries
        self._folder = folder
        self._node_address = node_address
        self._admission = admission
        self._stack = ExitStack()
        self._etcd_port, self._peer_port, self._port = (self._reserve_port() for _ in range(3))
        more = (node_address, SERVICE_ADDRESS) if node_address else ()
        self.keys = write_keys(folder, ("127.0.0.1", *more))
        self._children: dict[str, Child] = {}
        self.url = f"https://127.0.0.1:{self._port}"
        self.ca_file = self.keys.ca
        self.audit_file = folder / "audit.jsonl"
        """What ServiceAccounts asked for, see ``audit.py``."""
        self.admin = KubeHttp(self.url, self.ca_file, secrets.token_hex(16))
        """May do everything."""
        self.kubeconfig_file = folder / "kubeconfig"
        """The administrator's."""
        self._write_private("tokens.csv", f"{self.admin.token},admin,admin,system:masters\n")
        self._write_private("audit.json", json.dumps(AUDIT_POLICY))
        self._write_private("kubeconfig", json.dumps(_kubeconfig(self.admin)))

    def __enter__(self) -> Self:
        """It serves, and its controllers work.

        Raises:
            ChildError: A program died or was not ready within ``START_LIMIT_S``.
        """
        try:
            self._start("etcd", self._etcd_command())
            self.start_api_server()
            self._start_controllers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """All programs have ended, and the ports are free. Again, it does nothing."""
        for name in reversed([*self._children]):
            self._kill(name)
        self._stack.close()

    def kill_api_server(self) -> None:
        """It is gone, as after a crash: connections are cut, new ones refused. What it stored stays."""
        self._kill("api-server")

    def start_api_server(self) -> None:
        """It serves, at the ``url`` as ever.

        Raises:
            ChildError: See ``__enter__``.
        """
        self._start("api-server", self._api_server_command())
        self._wait("api-server", lambda: self._status_of("/readyz") == 200)

    def restart_api_server(self) -> None:
        """Killed and started again."""
        self.kill_api_server()
        self.start_api_server()

    @contextmanager
    def without_controllers(self) -> Iterator[None]:
        """Nothing changes by itself meanwhile: only requests do. Afterwards controllers take up what they missed."""
        self._kill("controller-manager")
        try:
            yield
        finally:
            self._start_controllers()

    def token_for(self, namespace: str, account: str) -> str:
        """A token of a ServiceAccount that exists, for ``TOKEN_LIFE_S``. What it may do, RBAC says."""
        spec = {"expirationSeconds": TOKEN_LIFE_S}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.admin.create(path, request)["status"]["token"])

    def as_account(self, namespace: str, account: str) -> KubeHttp:
        """Requests of a ServiceAccount."""
        return KubeHttp(self.url, self.ca_file, self.token_for(namespace, account))

    def compact(self) -> None:
        """History is gone: who goes on from an old resourceVersion is told 410, once the API server has forgotten too.

        Raises:
            OSError: etcd does not answer, or says no.
        """
        now = _post(f"{self._etcd_url}/v3/kv/range", {"key": "AA=="})["header"]["revision"]
        _post(f"{self._etcd_url}/v3/kv/compaction", {"revision": now, "physical": True})

    def pids(self) -> dict[str, int]:
        """Of what runs now."""
        return {name: child.pid for name, child in self._children.items()}

    def _start(self, name: str, command: list[str]) -> None:
        assert name not in self._children, f"{name} runs already"
        self._children[name] = Child(command, self._folder / f"{name}.log")

    def _start_controllers(self) -> None:
        self._start("controller-manager", self._controller_manager_command())
        self._wait("controller-manager", self._has_default_account)

    def _kill(self, name: str) -> None:
        self._children.pop(name).kill()

    def _wait(self, name: str, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not is_ready():
            for child in self._children.values():
                child.check()
            if time.monotonic() > deadline:
                words = self._children[name].last_words()
                raise ChildError(f"{name} was not ready within {START_LIMIT_S:.0f} s:\n{words}")
            time.sleep(_POLL_S)

    def _status_of(self, path: str) -> int:
        """0: nobody answers."""
        try:
            return self.admin.ask("GET", path).status
        except OSError:
            return 0

    def _has_default_account(self) -> bool:
        """The controller manager makes it, some controllers after it began."""
        return self._status_of("/api/v1/namespaces/default/serviceaccounts/default") == 200

    def _etcd_command(self) -> list[str]:
        peer = f"http://127.0.0.1:{self._peer_port}"
        return [
            str(self._binaries.etcd),
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--socket-reuse-port=true",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _api_server_command(self) -> list[str]:
        return [
            str(self._binaries.api_server),
            f"--etcd-servers={self._etcd_url}",
            *self._reach(),
            f"--secure-port={self._port}",
            "--permit-port-sharing=true",
            f"--tls-cert-file={self.keys.server_certificate}",
            f"--tls-private-key-file={self.keys.server_key}",
            "--anonymous-auth=false",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self._folder / 'tokens.csv'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.keys.accounts_public}",
            f"--service-account-signing-key-file={self.keys.accounts_private}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            f"--audit-policy-file={self._folder / 'audit.json'}",
            f"--audit-log-path={self.audit_file}",
            f"--enable-admission-plugins={','.join(self._admission)}",
        ]

    def _reach(self) -> list[str]:
        """Without a node no reconciler of its own endpoints: it would refuse 127.0.0.1, and nobody asks for the
        Service."""
        if not self._node_address:
            loopback = "127.0.0.1"
            return [f"--bind-address={loopback}", f"--advertise-address={loopback}", "--endpoint-reconciler-type=none"]
        return [
            "--bind-address=0.0.0.0",
            f"--advertise-address={self._node_address}",
            f"--kubelet-client-certificate={self.keys.client_certificate}",
            f"--kubelet-client-key={self.keys.client_key}",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def _controller_manager_command(self) -> list[str]:
        """With no port of its own; the only one, so it needs no Lease."""
        return [
            str(self._binaries.controller_manager),
            f"--kubeconfig={self.kubeconfig_file}",
            f"--service-account-private-key-file={self.keys.accounts_private}",
            f"--root-ca-file={self.keys.ca}",
            "--leader-elect=false",
            "--secure-port=0",
            "--horizontal-pod-autoscaler-sync-period=1s",  # 15 s by itself: a test would wait for nothing
        ]

    @property
    def _etcd_url(self) -> str:
        return f"http://127.0.0.1:{self._etcd_port}"

    def _reserve_port(self) -> int:
        port = ReservedPort()
        self._stack.callback(port.close)
        return port.number

    def _write_private(self, name: str, text: str) -> None:
        path = self._folder / name
        path.touch(mode=0o600)
        path.write_text(text)


def _post(url: str, body: dict[str, Any]) -> Any:
    """An answer of etcd's JSON gateway."""
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=10) as answer:
        return json.load(answer)


def _kubeconfig(user: KubeHttp) -> dict[str, Any]:
    """JSON is YAML."""
    cluster = {"server": user.url, "certificate-authority": str(user.ca_file)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": user.token}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "admin"}}],
        "current-context": "tests",
    }
