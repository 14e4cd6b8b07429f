"""Whatever stands in podOverrides, a plan is made or the spec is refused: no look ends in an exception."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from fakes.operator_cluster import FakeCluster, make_cluster
from operator_cases.objects import D, P
from pdcluster_operator.core.plan.preview import preview
from pdcluster_protocol.errors import ConfigError

NAMES: Final = (
    "metadata", "labels", "annotations", "finalizers", "spec", "containers", "initContainers", "volumes", "tolerations",
    "name", "env", "value", "ports", "containerPort", "volumeMounts", "mountPath", "securityContext", "$patch",
)  # fmt: skip
WORDS: Final = st.sampled_from(["engine", "router", "tmp", "HOME", "replace", "delete", "merge", "x", ""])
SCALARS: Final = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS
JSON: Final = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
ITEM: Final = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3)
POD: Final = st.fixed_dictionaries(
    {},
    optional={
        "metadata": JSON,
        "spec": JSON | st.fixed_dictionaries({}, optional={"containers": JSON | st.lists(ITEM, max_size=2)}),
        "$patch": WORDS,
    },
)


@example(P, {"metadata": {"$patch": "replace", "labels": "x"}})
@example("spec.router", {"metadata": {"$patch": "replace", "labels": ["x"]}})
@given(st.sampled_from([P, D, "spec.router"]), POD)
def test_overrides_of_any_shape_make_a_plan_or_a_refusal(part: str, overrides: dict[str, Any]) -> None:
    cluster = make_cluster({f"{part}.podOverrides": overrides})
    plan = FakeCluster().plan_for(cluster)
    assert plan.facts.refusal or plan.children
    event("refused" if plan.facts.refusal else "planned")
    with pytest.raises(ConfigError) if plan.facts.refusal else nullcontext():
        preview(make_cluster(), cluster)
