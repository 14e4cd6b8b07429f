"""Our CRDs on an API server: applied from ``crds/``, as the chart will."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import yaml

from control_plane.kube_http import KubeHttp, Object

FOLDER: Final = Path(__file__).resolve().parents[2] / "crds"
PATH: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
LIMIT_S: Final = 90.0


def crds() -> list[Object]:
    """Every document of ``crds/``."""
    return [yaml.safe_load(file.read_text()) for file in sorted(FOLDER.glob("*.yaml"))]


def apply_crds(admin: KubeHttp) -> list[Object]:
    """They are stored; whether they are served yet, ``wait_established`` says."""
    return [admin.apply(f"{PATH}/{crd['metadata']['name']}", crd) for crd in crds()]


def wait_established(admin: KubeHttp) -> None:
    """All of them are served.

    Raises:
        TimeoutError: One is not within ``LIMIT_S``; says its conditions.
    """
    deadline = time.monotonic() + LIMIT_S
    for crd in crds():
        path = f"{PATH}/{crd['metadata']['name']}"
        while (conditions := conditions_of(admin.get(path))).get("Established") != "True":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is not established: {conditions}")
            time.sleep(0.02)
        _wait_served(admin, crd, deadline)


def conditions_of(one: dict[str, Any]) -> dict[str, str]:
    """Type to status."""
    return {condition["type"]: condition["status"] for condition in one.get("status", {}).get("conditions") or []}


def _wait_served(admin: KubeHttp, crd: Object, deadline: float) -> None:
    """The condition is stored some milliseconds before the paths are there."""
    spec = crd["spec"]
    path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
    while (status := admin.ask("GET", path).status) != 200:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} answers {status}")
        time.sleep(0.02)
