"""A value that cannot be meant is refused by Helm, before anything is sent, with a message that names it."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import pytest

from chart_cases.rendering import CASES, chart

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a misspelled value", {"replica": 1}, "'replica' not allowed"),
    ("a misspelled value within a section", {"image": {"tagg": "1"}}, "'tagg' not allowed"),
    ("an unknown resource setting", {"resources": {"request": {}}}, "'request' not allowed"),
    ("a number as text", {"replicas": "2"}, "/replicas"),
    ("too many replicas", {"replicas": 6}, "/replicas"),
    ("a switch that is a word", {"crds": {"enabled": "yes"}}, "/crds/enabled"),
    ("a namespace that cannot be one", {"namespaces": ["Team_A"]}, "/namespaces/0"),
    ("a namespace twice", {"namespaces": ["a", "a"]}, "/namespaces"),
    ("a digest that is cut off", {"image": {"digest": "sha256:abc"}}, "/image/digest"),
    ("a name with a dot, which no Service may have", {"fullnameOverride": "team.pd"}, "/fullnameOverride"),
    ("a part of a name with a dot", {"nameOverride": "team.pd"}, "/nameOverride"),
    ("a pull secret that cannot be one", {"image": {"pullSecrets": ["Registry"]}}, "/image/pullSecrets/0"),
    ("a tag with a digest in it", {"image": {"tag": "1@sha256:abc"}}, "/image/tag"),
    ("an unknown pull policy", {"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
    ("an interval without a unit", {"serviceMonitor": {"interval": "30"}}, "/serviceMonitor/interval"),
    ("no port, which would be all", {"networkPolicy": {"apiServerPorts": []}}, "/networkPolicy/apiServerPorts"),
    ("a port that is none", {"networkPolicy": {"apiServerPorts": [0]}}, "/networkPolicy/apiServerPorts/0"),
    ("ports taken away, which would be all", {"networkPolicy": {"enabled": True, "apiServerPorts": None}}, "missing"),
    ("a section whose lines are all comments", {"image": None}, "image"),
    ("a section that is off by default, empty", {"serviceMonitor": None}, "serviceMonitor"),
    ("a switch taken away", {"rbac": {"create": None}}, "create"),
    ("no interval", {"serviceMonitor": {"enabled": True, "interval": None}}, "interval"),
]


@pytest.mark.parametrize(("values", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_it_is_refused_and_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        chart().render(values)
    assert message in str(refused.value)
    assert "values don't meet the specifications of the schema" in str(refused.value)


@pytest.mark.parametrize("case", CASES)
def test_what_the_tests_render_is_not_refused(case: str) -> None:
    chart().validate_schema(CASES[case])


def test_a_pull_secret_may_have_any_name_of_a_secret() -> None:
    chart().validate_schema({"image": {"pullSecrets": ["registry.example.com", "r" * 253]}})


def test_an_amount_may_be_a_number_or_text() -> None:
    chart().validate_schema({"resources": {"requests": {"cpu": 1, "memory": "64Mi"}, "limits": {"cpu": "500m"}}})


EMPTY = [
    "resources",
    "podLabels",
    "podAnnotations",
    "tolerations",
    "affinity",
    "priorityClassName",
    "namespaces",
    "args",
]


@pytest.mark.parametrize("key", EMPTY)
def test_what_may_be_empty_may_be_taken_away(key: str) -> None:
    """As in a pod: ``null`` is how Helm's users say that a chart's default shall not be."""
    assert chart().render({key: None})


@pytest.mark.parametrize("key", ["requests", "limits"])
def test_an_operator_without_a_limit_is_a_choice(key: str) -> None:
    assert chart().render({"resources": {key: None}})


def test_a_part_of_another_chart_gets_its_global_values() -> None:
    chart().validate_schema({"global": {"anything": 1}})


def test_an_account_that_nobody_makes_needs_a_name() -> None:
    with pytest.raises(helm.HelmError, match=r"serviceAccount.name is empty: name the account"):
        chart().render({"serviceAccount": {"create": False}})
