"""What the stories share: one cluster, one operator, one pool, which is whole again after each story."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Final

import helm_python as helm
import pytest

from campaign.questions import Answer, Question, make_questions
from e2e.box import FOLDER_VARIABLE
from e2e.cluster import OPERATOR, OPERATOR_NAMESPACE, Cluster, KubectlError
from e2e.images import PDCLUSTER_REPOSITORY, PDCLUSTER_TAG, make_images
from e2e.kept import keep
from e2e.node import Node
from e2e.pool import NodePaths, cpu_pool, node_paths
from e2e.readable import ensure_readable_model
from e2e.subject import SharedPool, Subject
from e2e.warm import ensure_warm
from pdcluster_cli.models.tiny_model import cache_root

ROOT: Final = Path(__file__).resolve().parents[1]
INSTALL_S: Final = 180
STORIES: Final = ("test_node", "test_first_pool", "test_status_page", "test_changes", "test_faults", "test_last_day")
"""First what others stand on, last what takes it away."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order of ``STORIES``. A story takes minutes on a busy machine; none may take for ever."""
    items.sort(key=lambda item: STORIES.index(item.path.stem))
    for item in items:
        item.add_marker(pytest.mark.timeout(1800))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A story that failed tells what a person would look at first, and keeps the rest in the cache."""
    report = yield
    cluster = item.funcargs.get("cluster")
    if report.failed and isinstance(cluster, Cluster):
        folder = cache_root(os.environ) / "e2e" / "kept" / item.name
        report.sections.append((f"Cluster, more in {folder}", _kept(cluster, folder)))
    return report


def _kept(cluster: Cluster, folder: Path) -> str:
    try:
        keep(cluster, folder)
        return cluster.story("default")
    except KubectlError as error:
        return str(error)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Ours, in the box that ``python -m e2e`` made; or the one of KUBECONFIG."""
    if given := os.environ.get("KUBECONFIG"):
        yield Cluster(shutil.which("kubectl") or "kubectl", Path(given))
        return
    folder = Path(os.environ[FOLDER_VARIABLE]) / "node"
    folder.mkdir()
    images = make_images(cache_root(os.environ) / "e2e" / "layers", print)
    began_at = time.monotonic()
    with Node(folder, images) as node:
        print(f"\nnode ready after {time.monotonic() - began_at:.1f} s")
        yield Cluster(str(node.kubectl), node.kubeconfig, node)


@pytest.fixture(scope="session")
def release(cluster: Cluster) -> Iterator[helm.Config]:
    """The chart is installed, and both operators are ready."""
    values = {
        "image": {
            "repository": os.environ.get("PDCLUSTER_E2E_REPOSITORY", PDCLUSTER_REPOSITORY),
            "tag": os.environ.get("PDCLUSTER_E2E_TAG", PDCLUSTER_TAG),
        },
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
    }
    began_at = time.monotonic()
    with helm.Config(kubeconfig_path=cluster.kubeconfig, namespace=OPERATOR_NAMESPACE) as config:
        config.install(ROOT / "charts" / "pdcluster", "pdcluster", values, timeout=INSTALL_S, create_namespace=True)
        try:
            cluster.wait(f"deployment/{OPERATOR}", "condition=Available", OPERATOR_NAMESPACE, INSTALL_S)
        except KubectlError as error:
            raise AssertionError(f"no operator: {cluster.story(OPERATOR_NAMESPACE)}") from error
        print(f"operator ready after {time.monotonic() - began_at:.1f} s")
        yield config
        config.uninstall("pdcluster", timeout=INSTALL_S)


@pytest.fixture(scope="session")
def paths() -> NodePaths:
    cache = cache_root(os.environ) / "e2e"
    return node_paths(ensure_readable_model(cache), ensure_warm(cache, print))


@pytest.fixture(scope="session")
def shared(cluster: Cluster, release: helm.Config, paths: NodePaths) -> Iterator[SharedPool]:
    """Ready, and gone at the end."""
    pool = SharedPool(Subject(cluster, "tiny"), cpu_pool(paths, "tiny"))
    began_at = time.monotonic()
    pool.take_on()
    print(f"\npool Ready {time.monotonic() - began_at:.1f} s after kubectl apply")
    yield pool
    cluster.run("-n", "default", "delete", "pdcluster", "tiny", "--ignore-not-found")


@pytest.fixture(scope="session")
def expected(shared: SharedPool) -> Mapping[Question, Answer]:
    """Every question of the fault campaign with a single engine's answer: equal for every block size."""
    return shared.subject.ask_prefill_alone(make_questions())
