"""The chart as Helm renders it, for values that turn its parts on and off. Offline; tens of milliseconds a case."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import helm_python as helm
import yaml

Object = dict[str, Any]

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "charts" / "pdcluster"
RELEASE: Final = "pdcluster"
NAMESPACE: Final = "pdcluster-system"

EVERYTHING: Final[Object] = {
    "image": {"digest": "sha256:" + "a" * 64, "pullSecrets": ["registry"]},
    "routerImage": "mirror/pdcluster:2",
    "args": ["--workers=4"],
    "serviceAccount": {"annotations": {"team": "inference"}},
    "podLabels": {"team": "inference", "app.kubernetes.io/name": "not-ours"},
    "podAnnotations": {"team": "inference"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "system", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "podDisruptionBudget": {"enabled": True},
    "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True, "annotations": {"folder": "inference"}},
}
NAMESPACED: Final[Object] = {**EVERYTHING, "namespaces": ["team-a", "team-b"]}
SECOND: Final[Object] = {
    "nameOverride": "second",
    "namespaces": ["team-c"],
    "crds": {"enabled": False},
    "rbac": {"create": False, "aggregate": False},
    "serviceAccount": {"create": False, "name": "mine"},
    "replicas": 0,
}
CASES: Final[dict[str, Object]] = {
    "default": {},
    "everything on": EVERYTHING,
    "namespaced": NAMESPACED,
    "a second release": SECOND,
}


@cache
def chart() -> helm.Chart:
    return helm.Chart.load(CHART)


@cache
def rendered_files(case: str) -> dict[str, str]:
    """Template's path, without the chart's name, to its text."""
    files = chart().render(CASES[case], name=RELEASE, namespace=NAMESPACE)
    return {name.partition("/templates/")[2]: text for name, text in files.items()}


def objects(case: str) -> list[Object]:
    """Every object of the case, those of ``helm test`` too. Shared: nobody changes them."""
    return list(_parsed(case))


@cache
def _parsed(case: str) -> tuple[Object, ...]:
    """A quarter of a second: the CRDs are large."""
    return tuple(_objects_in(rendered_files(case)))


def of_kind(case: str, kind: str) -> list[Object]:
    return [found for found in objects(case) if found["kind"] == kind]


def named(case: str, kind: str, name: str) -> Object:
    """The one object of this kind and name; in several namespaces the first."""
    return next(found for found in of_kind(case, kind) if found["metadata"]["name"] == name)


def pod_specs(case: str) -> list[Object]:
    """The pod of each workload, and the pod of ``helm test``."""
    found = [workload["spec"]["template"]["spec"] for workload in of_kind(case, "Deployment")]
    return found + [pod["spec"] for pod in of_kind(case, "Pod")]


def rights() -> dict[str, list[Object]]:
    """``files/rights.yaml``."""
    found: dict[str, list[Object]] = yaml.safe_load((CHART / "files" / "rights.yaml").read_text())
    return found


def objects_of(values: Object, *, name: str, namespace: str) -> list[Object]:
    """Every object of a release of this name, in this namespace."""
    return list(_objects_in(chart().render(values, name=name, namespace=namespace)))


def _objects_in(files: dict[str, str]) -> Iterator[Object]:
    for name, text in files.items():
        if name.endswith(".yaml"):
            yield from (found for found in yaml.safe_load_all(text) if found)
