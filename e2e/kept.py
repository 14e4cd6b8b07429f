"""What is kept of a cluster after a story that failed: all events, and the whole logs of the pods that live."""

from __future__ import annotations

import shutil
from pathlib import Path

from e2e.cluster import OPERATOR_NAMESPACE, Cluster, KubectlError

NAMESPACES = ("default", OPERATOR_NAMESPACE)


def keep(cluster: Cluster, folder: Path) -> None:
    """Writes it to ``folder``, which is emptied first. What kubectl does not say is replaced by its error."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _write(cluster, folder / "events", "get", "events", "-A", "--sort-by=.lastTimestamp")
    _write(cluster, folder / "objects", "get", "pdclusters,pods,endpointslices", "-A", "-o", "yaml")
    for namespace in NAMESPACES:
        for pod in cluster.items("pods", namespace):
            name = pod["metadata"]["name"]
            words = ("-n", namespace, "logs", name, "--all-containers", "--timestamps")
            _write(cluster, folder / f"{name}.log", *words)
            if any(told["restartCount"] for told in pod["status"].get("containerStatuses", [])):
                _write(cluster, folder / f"{name}.previous.log", *words, "--previous")


def _write(cluster: Cluster, file: Path, *words: str) -> None:
    try:
        file.write_text(cluster.run(*words))
    except KubectlError as error:
        file.write_text(str(error))
