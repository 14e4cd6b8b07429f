"""``docs/kubernetes.md`` names what there is: every command of it is held against chart, CRDs, examples and recipes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, Final

import helm_python as helm
import pytest
import yaml

from chart_cases.rendering import CHART, chart
from pdcluster_operator.api.cluster import PDCluster
from pdcluster_operator.api.crd import KINDS, crd
from pdcluster_operator.core.explain import CURES

ROOT: Final = Path(__file__).resolve().parents[2]
TEXT: Final = (ROOT / "docs" / "kubernetes.md").read_text()
COMMANDS: Final = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", TEXT, re.MULTILINE)]
BUILT_IN: Final = {"service", "crd"}


def of(program: str) -> list[list[str]]:
    return [words for words in COMMANDS if words[0] == program]


def after(words: list[str], flag: str) -> list[str]:
    """The word behind each ``flag``."""
    return [words[place + 1] for place, word in enumerate(words) if word == flag]


def examples() -> dict[str, PDCluster]:
    """By name of the PDCluster."""
    files = [yaml.safe_load(file.read_text()) for file in (ROOT / "examples").iterdir()]
    return {found["metadata"]["name"]: PDCluster.from_wire(found) for found in files}


def test_the_page_has_the_commands_that_matter() -> None:
    assert {words[0] for words in COMMANDS} == {"docker", "helm", "kubectl", "curl", "pdcluster"}
    assert len(COMMANDS) >= 15


@pytest.mark.parametrize("words", of("helm"), ids=shlex.join)
def test_helm_is_given_this_chart_and_values_that_it_takes(words: list[str]) -> None:
    assert {word for word in words if "/" in word and "=" not in word} <= {str(CHART.relative_to(ROOT))}
    values: dict[str, Any] = {}
    for expression in after(words, "--set"):
        values = _merged(values, helm.parse_set_string(expression))
    chart().validate_schema(values)


@pytest.mark.parametrize("words", of("docker"), ids=lambda words: words[3])
def test_docker_is_given_recipes_and_arguments_that_exist(words: list[str]) -> None:
    (recipe,) = after(words, "-f")
    arguments = {
        line.partition("=")[0] for line in re.findall(r"^ARG (\S+)", (ROOT / recipe).read_text(), re.MULTILINE)
    }
    assert {argument.partition("=")[0] for argument in after(words, "--build-arg")} <= arguments
    (tag,) = after(words, "-t")
    used = {found.spec.image for found in examples().values()} | {
        f"pdcluster/pdcluster:{chart().metadata['appVersion']}"
    }
    assert tag in used


@pytest.mark.parametrize("words", of("kubectl"), ids=shlex.join)
def test_kubectl_is_given_kinds_and_files_that_exist(words: list[str]) -> None:
    names = [crd(kind)["spec"]["names"] for kind in KINDS]
    known = BUILT_IN | {word for found in names for word in (found["plural"], found["singular"], *found["shortNames"])}
    if words[1] == "apply":
        assert (ROOT / words[3]).is_file()
    else:
        target = next(word for word in words[2:] if not word.startswith("-"))
        assert target.partition("/")[0] in known


def test_pools_scalers_and_services_are_those_of_the_examples() -> None:
    pools = examples()
    named = {word for words in of("kubectl") for word in words if word in pools or "/" in word}
    assert "tiny" in pools
    assert "pdcluster/tiny" in named
    assert "service/tiny-router" in named
    assert "pdrolescaler/llama-70b-decode" in named
    assert "llama-70b" in pools


def test_the_question_asks_for_the_model_of_the_example() -> None:
    (question,) = of("curl")
    body = yaml.safe_load(after(question, "-d")[0])
    assert body["model"] == examples()["tiny"].spec.model.public_name


def test_removing_names_every_crd() -> None:
    (removal,) = [words for words in of("kubectl") if words[1:3] == ["delete", "crd"]]
    assert set(removal[3:]) == {crd(kind)["metadata"]["name"] for kind in KINDS}


def test_the_shown_table_has_the_columns_that_kubectl_prints() -> None:
    (header,) = re.findall(r"^NAME +.*$", TEXT, re.MULTILINE)
    columns = [column.name.upper() for column in KINDS[0].columns]
    assert header.split() == ["NAME", *columns]


def test_operations_has_every_reason_that_needs_somebody_and_every_alert() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    assert [reason.value for reason in CURES if f"`{reason.value}`" not in rows] == []
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"][0]["rules"]
    wanted = {f"| `{rule['alert']}` | {rule['labels']['severity']} |" for rule in rules}
    assert [row for row in wanted if row not in rows] == []


def _merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in other.items():
        found[key] = _merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found
