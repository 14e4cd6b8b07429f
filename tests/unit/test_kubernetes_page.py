"""``docs/kubernetes.md`` names what there is, and so does the page of operations: charts, recipes, examples, options.

``tests/integration/test_kubernetes_pages.py`` runs what kubectl can do without a node.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any, Final

import helm_python as helm
import pytest
import yaml
from tools.crd import KINDS, crd

from chart_cases.pages import QUICK_START, Words, after, commands_of, of
from chart_cases.rendering import CHART, chart
from pdcluster_cli.cluster import explain, plan
from pdcluster_operator.api.cluster import PDCluster

SETTING: Final = ("--set", "--values", "--version")
HELM: Final[dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]]] = {
    "install": (2, ("--create-namespace", "--wait", "--atomic"), (*SETTING, "--timeout")),
    "upgrade": (2, ("--install", "--reset-then-reuse-values", "--wait", "--atomic"), (*SETTING, "--timeout")),
    "test": (1, ("--logs",), ("--timeout",)),
    "rollback": (1, ("--wait",), ("--timeout",)),
    "uninstall": (1, ("--keep-history", "--wait"), ("--timeout",)),
    "history": (1, (), ("--max", "--output")),
    "get values": (1, ("--all",), ("--output", "--revision")),
}
"""Helm 3.14's command to its number of plain words, its switches and its flags with a value: what a page may need.
Written down here, since helm-python has Helm's library but not its command line."""
ROOT: Final = Path(__file__).resolve().parents[2]
TEXT: Final = QUICK_START.read_text()
COMMANDS: Final = commands_of(QUICK_START)


def examples() -> dict[str, PDCluster]:
    """By name of the PDCluster."""
    files = [yaml.safe_load(file.read_text()) for file in (ROOT / "examples").iterdir()]
    return {found["metadata"]["name"]: PDCluster.from_wire(found) for found in files}


def check_helm(words: Words) -> None:
    """Helm takes these words. Only parses; as Helm does, but an abbreviation is refused.

    Raises:
        SystemExit: It does not.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--namespace", "-n")
    commands = parser.add_subparsers(required=True)
    for name, (count, switches, valued) in HELM.items():
        command = commands.add_parser(name.replace(" ", "-"), allow_abbrev=False)
        command.add_argument("plain", nargs=count)
        command.add_argument("--namespace", "-n")
        for switch in switches:
            command.add_argument(switch, action="store_true")
        for flag in valued:
            command.add_argument(flag, action="append")
    parser.parse_args(shlex.split(shlex.join(words).replace(" get values ", " get-values "))[1:])


def test_the_page_has_the_commands_that_matter() -> None:
    assert {words[0] for words in COMMANDS} == {"docker", "helm", "kubectl", "curl", "pdcluster"}
    assert len(COMMANDS) >= 15


@pytest.mark.parametrize("words", of("helm"), ids=shlex.join)
def test_helm_is_given_this_chart_and_values_that_it_takes(words: Words) -> None:
    assert {word for word in words if "/" in word and "=" not in word} <= {str(CHART.relative_to(ROOT))}
    values: dict[str, Any] = {}
    for expression in after(words, "--set"):
        values = _merged(values, helm.parse_set_string(expression))
    chart().validate_schema(values)


@pytest.mark.parametrize("words", of("helm"), ids=shlex.join)
def test_helm_is_given_commands_and_flags_that_it_has(words: Words) -> None:
    check_helm(words)


@pytest.mark.parametrize(
    "wrong",
    [
        "helm instal pdcluster charts/pdcluster",
        "helm upgrade pdcluster charts/pdcluster --reset-then-reuse-value",
        "helm install pdcluster charts/pdcluster --reset-then-reuse-values",
        "helm test pdcluster --create-namespace",
        "helm install charts/pdcluster",
        "helm get value pdcluster",
    ],
)
def test_the_check_of_helms_words_is_not_blind(wrong: str) -> None:
    with pytest.raises(SystemExit):
        check_helm(shlex.split(wrong))


@pytest.mark.parametrize("words", of("docker"), ids=lambda words: words[3])
def test_docker_is_given_recipes_and_arguments_that_exist(words: Words) -> None:
    (recipe,) = after(words, "-f")
    arguments = {
        line.partition("=")[0] for line in re.findall(r"^ARG (\S+)", (ROOT / recipe).read_text(), re.MULTILINE)
    }
    assert {argument.partition("=")[0] for argument in after(words, "--build-arg")} <= arguments
    (tag,) = after(words, "-t")
    used = {found.spec.image for found in examples().values()} | {
        f"localhost/pdcluster/pdcluster:{chart().metadata['appVersion']}"
    }
    assert tag in used


@pytest.mark.parametrize("words", of("pdcluster"), ids=shlex.join)
def test_pdcluster_is_given_options_and_files_that_exist(words: Words) -> None:
    given = {"explain": explain, "plan": plan}[words[1]].make_parser().parse_args(words[2:])
    assert given.file is None or (ROOT / given.file).is_file()


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


def _merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in other.items():
        found[key] = _merged(found.get(key, {}), value) if isinstance(value, dict) else value
    return found
