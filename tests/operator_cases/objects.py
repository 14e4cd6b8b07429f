"""Objects that the API server takes, and objects that it refuses with the message it must show.

One table for two judges: the unit tests hold the models against it, the integration tests a real API server. A refusal
by a type or a bound is the schema's, and the models refuse it too; one by a rule is the API server's alone (CEL), and
the models take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

Object = dict[str, Any]
ABSENT: Final = object()
"""As a value: the field is not there."""


class By(Enum):
    """Who refuses."""

    SCHEMA = "schema"
    RULE = "rule"


@dataclass(frozen=True, slots=True)
class Accepted:
    """``changes`` to the smallest object, by path; ``before``: an update of that one."""

    name: str
    changes: Mapping[str, object] = field(default_factory=dict)
    before: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """``message`` is in every line of what the API server answers; a change of both roles is refused for each."""

    name: str
    changes: Mapping[str, object]
    message: str
    by: By = By.RULE
    before: Mapping[str, object] | None = None


def pdcluster(changes: Mapping[str, object]) -> Object:
    """The smallest PDCluster with some fields changed: ``spec.roles.decode.replicas`` to 2."""
    roles = {role: {"device": {"kind": "cpu"}} for role in ("prefill", "decode")}
    spec = {"model": {"name": "tiny"}, "image": "engine:1", "roles": roles}
    metadata = {"name": "pool", "namespace": "default"}
    return _changed(
        {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDCluster", "metadata": metadata, "spec": spec}, changes
    )


def scaler(changes: Mapping[str, object]) -> Object:
    """The smallest PDRoleScaler with some fields changed."""
    spec = {"clusterRef": {"name": "pool"}, "role": "prefill", "replicas": 1}
    metadata = {"name": "pool-prefill", "namespace": "default"}
    return _changed(
        {"apiVersion": "pdcluster.dev/v1alpha1", "kind": "PDRoleScaler", "metadata": metadata, "spec": spec}, changes
    )


def _changed(base: Object, changes: Mapping[str, object]) -> Object:
    found = deepcopy(base)
    for path, value in changes.items():
        *folders, last = path.split(".")
        place = found
        for folder in folders:
            place = place.setdefault(folder, {})
        if value is ABSENT:
            place.pop(last, None)
        else:
            place[last] = deepcopy(value)
    return found


def both(path: str, value: object) -> dict[str, object]:
    """The same change to both roles."""
    return {f"spec.roles.{role}.{path}": value for role in ("prefill", "decode")}


CUDA: Final = both("device.kind", "cuda")
P: Final = "spec.roles.prefill"
D: Final = "spec.roles.decode"
