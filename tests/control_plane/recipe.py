"""How each program of the control plane is built. Decides, and does nothing; ``binaries.py`` does.

``go.mod`` and ``go.sum`` beside this file say which sources, to the hash; they are arguments here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final, NewType

Program = NewType("Program", str)
GoVersion = tuple[int, ...]

ETCD: Final = Program("etcd")
API_SERVER: Final = Program("kube-apiserver")
CONTROLLER_MANAGER: Final = Program("kube-controller-manager")
SCHEDULER: Final = Program("kube-scheduler")
KUBELET: Final = Program("kubelet")
KUBE_PROXY: Final = Program("kube-proxy")
KUBECTL: Final = Program("kubectl")

PLANE: Final = (ETCD, API_SERVER, CONTROLLER_MANAGER)
"""What most tests need."""
NODE: Final = (SCHEDULER, KUBELET, KUBE_PROXY, KUBECTL)
"""What a node needs beside them: ``make e2e``. Tests of what our pages tell a reader to type need kubectl too."""

PACKAGES: Final[Mapping[Program, str]] = {
    ETCD: "go.etcd.io/etcd/server/v3",
    API_SERVER: "k8s.io/kubernetes/cmd/kube-apiserver",
    CONTROLLER_MANAGER: "k8s.io/kubernetes/cmd/kube-controller-manager",
    SCHEDULER: "k8s.io/kubernetes/cmd/kube-scheduler",
    KUBELET: "k8s.io/kubernetes/cmd/kubelet",
    KUBE_PROXY: "k8s.io/kubernetes/cmd/kube-proxy",
    KUBECTL: "k8s.io/kubernetes/cmd/kubectl",
}


def build_arguments(program: Program, go_mod: str) -> tuple[str, ...]:
    """``go``'s arguments, run in the folder of ``go.mod``; the output file and the package are still to follow."""
    return ("build", "-trimpath", "-buildvcs=false", "-ldflags", " ".join(_link_flags(program, go_mod)))


def cache_key(go_mod: str, go_sum: str) -> str:
    """Another version of a source or other flags give another name: 12 hexadecimal digits."""
    recipe = repr([(program, package, build_arguments(program, go_mod)) for program, package in PACKAGES.items()])
    return hashlib.sha256("\0".join((go_mod, go_sum, recipe)).encode()).hexdigest()[:12]


def kubernetes_version(go_mod: str) -> str:
    """``1.35.4``."""
    return _found(r"^require k8s\.io/kubernetes v(\S+)|^\s+k8s\.io/kubernetes v(\S+)", go_mod)


def needed_go(go_mod: str) -> GoVersion:
    """The oldest Go that may build: ``go 1.25.0`` is (1, 25, 0)."""
    return go_version(_found(r"^go (\S+)$", go_mod))


def go_version(text: str) -> GoVersion:
    """``go1.26.8`` and ``1.26.8`` are (1, 26, 8); anything else is older than all."""
    numbers = re.match(r"(?:go)?(\d+(?:\.\d+)*)", text)
    return tuple(int(number) for number in numbers[1].split(".")) if numbers else ()


def _link_flags(program: Program, go_mod: str) -> tuple[str, ...]:
    """Kubernetes' own build scripts set the version that ``/version`` shows; without them it is v0.0.0."""
    if program == ETCD:
        return ("-s", "-w")
    version = kubernetes_version(go_mod)
    major, minor, _ = version.split(".")
    facts = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return ("-s", "-w", *(f"-X k8s.io/component-base/version.{name}={value}" for name, value in facts.items()))


def _found(pattern: str, go_mod: str) -> str:
    match = re.search(pattern, go_mod, re.MULTILINE)
    assert match, f"go.mod has no {pattern}"
    return next(group for group in match.groups() if group)
