"""The PDCluster of ``examples/cpu.yaml`` as this machine can run it.

What is laid over the example, and why; everything else stays as a user has it:

    model             the tiny model of our tests, from the node: there is no way to a model hub
    image             a Debian root folder: there is no registry to have an engine image from
    podOverrides      this checkout, its virtual environment and its interpreter from the node, at their own paths
    env PATH          so that ``python3`` and ``pdcluster`` are the environment's
    vLLM's cache      what it finds out about a model's class, from the node (``warm.py``): a third of an engine's start
    resources         a tenth of a core is asked for, one may be used: four engines share two cores
    engineArgs        float32, for equal tokens whatever the batch; a small cache
    drain, transfer   shorter limits than an hour's rollout needs
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from e2e.archive import PATH

Object = dict[str, Any]

EXAMPLE: Final = Path(__file__).resolve().parents[1] / "examples" / "cpu.yaml"
ENGINE_IMAGE: Final = "e2e.local/engine:1"
SERVED_NAME: Final = "tiny"
ENGINE: Final = "engine"
ROUTER: Final = "router"
ENGINE_ARGS: Final = {
    "dtype": "float32",
    "max-model-len": "1024",
    "max-num-seqs": "16",
    "block-size": "32",
    "kv-cache-memory-bytes": str(64 << 20),
    # One process less in each engine: it is one rank.
    "distributed-executor-backend": "uni",
}
ENGINE_ENV: Final = {
    "HF_HUB_OFFLINE": "1",
    # Else vLLM's CPU platform turns "uni" into "mp".
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
RESOURCES: Final = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"cpu": "1", "memory": "4Gi"}}


@dataclass(frozen=True, slots=True)
class NodePaths:
    """What engines take from their node. ``code``: folders that hold the environment and what it points to.
    ``vllm_cache``: as ``warm.py`` makes it."""

    code: tuple[Path, ...]
    programs: Path
    model: Path
    vllm_cache: Path

    @property
    def folders(self) -> tuple[Path, ...]:
        """Those that a pod has at the same place as the node."""
        return (*self.code, self.vllm_cache)


def node_paths(model: Path, vllm_cache: Path) -> NodePaths:
    """Of the environment that runs this. An interpreter below /usr is the root folder's own: the same Debian."""
    wanted = [EXAMPLE.parents[1], Path(sys.prefix), Path(sys.base_prefix)]
    outside = [path for path in wanted if not path.is_relative_to("/usr")]
    code = [path for path in outside if not any(path != other and path.is_relative_to(other) for other in outside)]
    return NodePaths(tuple(dict.fromkeys(code)), Path(sys.prefix) / "bin", model, vllm_cache)


def cpu_pool(paths: NodePaths, name: str = "tiny", namespace: str = "default") -> Object:
    """The whole object."""
    pool: Object = yaml.safe_load(EXAMPLE.read_text())
    spec = pool["spec"]
    pool["metadata"] = {"name": name, "namespace": namespace}
    volume = {"source": {"hostPath": {"path": str(paths.model), "type": "Directory"}}}
    spec["model"] = {"volume": volume, "servedName": SERVED_NAME}
    spec["image"] = ENGINE_IMAGE
    for role in spec["roles"].values():
        role["resources"] = RESOURCES
        role["engineArgs"] = {**role["engineArgs"], **ENGINE_ARGS}
        role["env"] = [{"name": key, "value": value} for key, value in _env(paths).items()]
        role["podOverrides"] = {"spec": _from_node(paths.folders)}
    spec["router"] = {**spec["router"], "replicas": 2, "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    spec["drain"] = {"timeoutSeconds": 180}
    return pool


def with_replicas(pool: Object, **replicas: int) -> Object:
    """By role."""
    roles = pool["spec"]["roles"]
    changed = {name: {**role, "replicas": replicas.get(name, role.get("replicas", 1))} for name, role in roles.items()}
    return {**pool, "spec": {**pool["spec"], "roles": changed}}


def with_engine_arg(pool: Object, name: str, value: str, roles: Sequence[str] = ("prefill", "decode")) -> Object:
    """Of the named roles."""
    changed = {
        role: {**spec, "engineArgs": {**spec["engineArgs"], name: value}} if role in roles else spec
        for role, spec in pool["spec"]["roles"].items()
    }
    return {**pool, "spec": {**pool["spec"], "roles": changed}}


def _env(paths: NodePaths) -> Mapping[str, str]:
    return {"PATH": f"{paths.programs}:{PATH}", "VLLM_CACHE_ROOT": str(paths.vllm_cache), **ENGINE_ENV}


def _from_node(folders: Sequence[Path]) -> Object:
    """Part of a pod's spec."""
    named = {f"node-{number}": str(folder) for number, folder in enumerate(folders)}
    mounts = [{"name": name, "mountPath": folder, "readOnly": True} for name, folder in named.items()]
    volumes = [{"name": name, "hostPath": {"path": folder, "type": "Directory"}} for name, folder in named.items()]
    return {"containers": [{"name": ENGINE, "volumeMounts": mounts}], "volumes": volumes}
