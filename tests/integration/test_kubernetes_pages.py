"""Real kubectl on a real API server: what the pages on Kubernetes tell a reader to type, in their order.

There are no nodes and no operator. So a Node without a machine stands in for one to be drained, tests write the status
that ``kubectl wait`` looks for; the stories of ``e2e`` have both in earnest, and the forwarded port with its curl. The
chart is there because Helm put it there. Helm's command line is held by ``tests/unit/test_kubernetes_page.py``.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import helm_python as helm
import pytest
import yaml

from chart_cases.pages import OPERATIONS, QUICK_START, ROOT, Words, of
from chart_cases.rendering import CHART, NAMESPACE, RELEASE
from control_plane.binaries import find_binaries, find_programs
from control_plane.crds import wait_established
from control_plane.kube_http import MERGE_PATCH, Object
from control_plane.plane import ControlPlane
from control_plane.recipe import KUBECTL
from integration.harness import eventually
from pdcluster_operator.core.status.explain import NOT_LOOKED_AT

pytestmark = [pytest.mark.control_plane, pytest.mark.slow]

NODELESS: Final = ("port-forward",)
"""What cannot be done without a node."""
POOLS: Final = "/apis/pdcluster.dev/v1alpha1/namespaces/default/pdclusters"
SCALERS: Final = "/apis/pdcluster.dev/v1alpha1/namespaces/default/pdrolescalers"
LIMIT_S: Final = 60.0
TIME: Final = "2026-11-21T10:00:00Z"


class User:
    """Somebody at a terminal, with kubectl and pdcluster, in a checkout."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane = plane
        folder.joinpath("kubectl").symlink_to(find_programs(os.environ, (KUBECTL,))[KUBECTL])
        path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
        self._env = {**os.environ, "PATH": path, "KUBECONFIG": str(plane.kubeconfig_file), "HOME": str(folder)}

    def types(self, words: Words, status: int = 0) -> str:
        """What the command prints; it ends with ``status``."""
        done = self._runs(words)
        assert done.returncode == status, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def knows_pools(self) -> bool:
        """Discovery may tell of the kinds a moment after they are served, and kubectl takes none that it does not."""
        listed = self._runs(["kubectl", "api-resources", "--api-group=pdcluster.dev", "--output=name"])
        return {"pdclusters.pdcluster.dev", "pdrolescalers.pdcluster.dev"} <= {*listed.stdout.split()}

    def _runs(self, words: Words) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=ROOT, env=self._env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    def get_ready(self, name: str) -> None:
        """The operator's part: the status says Ready, of the spec as it is now (``kubectl wait`` looks at that)."""
        seen = self.plane.admin.get(f"{POOLS}/{name}")["metadata"]["generation"]
        ready = {"type": "Ready", "status": "True", "reason": "Serving", "message": "", "observedGeneration": seen}
        conditions = [{**ready, "lastTransitionTime": TIME}]
        status = {"conditions": conditions, "model": "Qwen/Qwen3-0.6B", "target": "a-b-c", "observedGeneration": seen}
        path = f"{POOLS}/{name}/status"
        assert self.plane.admin.ask("PATCH", path, {"status": status}, content_type=MERGE_PATCH).status == 200


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """With a chart that is installed, a node, and both pools that the pages name."""
    with ControlPlane(find_binaries(os.environ), tmp_path_factory.mktemp("pages")) as plane:
        plane.admin.create("/api/v1/namespaces", kind_of("v1", "Namespace", NAMESPACE))
        plane.admin.create("/api/v1/nodes", kind_of("v1", "Node", "worker-1"))
        with helm.Config(kubeconfig_path=plane.kubeconfig_file, namespace=NAMESPACE) as config:
            config.install(CHART, RELEASE, {}, timeout=60)
        wait_established(plane.admin)
        lease = kind_of("coordination.k8s.io/v1", "Lease", "pdcluster-operator")
        plane.admin.create(f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases", lease)
        found = User(plane, tmp_path_factory.mktemp("bin"))
        assert eventually(found.knows_pools, timeout_s=LIMIT_S)
        for file in ("cpu.yaml", "nvidia.yaml"):
            found.types(["kubectl", "apply", "-f", f"examples/{file}"])
        spec = {"clusterRef": {"name": "llama-70b"}, "role": "decode", "replicas": 1}
        scaler = kind_of("pdcluster.dev/v1alpha1", "PDRoleScaler", "llama-70b-decode")
        plane.admin.create(SCALERS, {**scaler, "spec": spec})
        yield found


def kind_of(api_version: str, kind: str, name: str) -> Object:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}}


def test_a_new_pool_was_not_looked_at_yet(user: User) -> None:
    assert user.types(["pdcluster", "explain", "tiny"], status=1) == f"{NOT_LOOKED_AT}\n"


def test_every_kubectl_command_of_operations_is_taken(user: User) -> None:
    for words in of("kubectl", OPERATIONS):
        user.types(words)


def test_the_refusal_that_the_quick_start_shows_is_what_kubectl_prints(user: User, tmp_path: Path) -> None:
    """``examples/cpu.yaml``, whose decode has lost its dtype."""
    pool = yaml.safe_load((ROOT / "examples" / "cpu.yaml").read_text())
    del pool["spec"]["roles"]["decode"]["engineArgs"]["dtype"]
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(pool))
    printed = user.types(["kubectl", "apply", "-f", str(file)], status=1)
    lines = QUICK_START.read_text().splitlines()
    [first] = [number for number, line in enumerate(lines) if line.startswith("The PDCluster ")]
    shown = " ".join(line.strip() for line in lines[first : lines.index("```", first)])
    assert printed.splitlines() == [shown]


def test_what_applied_a_pool_is_printed_ready_to_be_applied_again(user: User) -> None:
    (words,) = [words for words in of("kubectl", OPERATIONS) if "view-last-applied" in words]
    printed = user.types(words)
    assert "uid" not in printed
    assert "Qwen/Qwen3-0.6B" in printed


def test_pausing_is_seen_in_the_object_and_ends(user: User) -> None:
    pause, go_on = [words for words in of("kubectl", OPERATIONS) if "patch" in words]
    user.types(pause)
    assert user.plane.admin.get(f"{POOLS}/tiny")["spec"]["rollout"]["paused"] is True
    user.types(go_on)
    assert user.plane.admin.get(f"{POOLS}/tiny")["spec"]["rollout"]["paused"] is False


def test_the_pdcluster_commands_of_both_pages_end_well_with_a_pool_that_is_ready(user: User) -> None:
    user.get_ready("tiny")
    printed = [user.types(words) for words in of("pdcluster")]
    assert "Ready: 0 prefill" in "".join(printed)
    assert "\nsteps: none\n" in "".join(printed), "what runs is what the file asks for"


def test_the_quick_start_is_taken_to_its_end(user: User) -> None:
    """The last commands remove the kinds: it is the last test."""
    user.get_ready("tiny")
    commands = of("kubectl", QUICK_START)
    skipped = [words for words in commands if words[1] in NODELESS]
    assert len(skipped) == 1
    for words in (words for words in commands if words not in skipped):
        user.types(words)
    # kubectl waits for the CRD to go; the API server goes on answering for its kind a moment longer.
    assert eventually(lambda: user.plane.admin.ask("GET", POOLS).status == 404)
