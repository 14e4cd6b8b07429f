"""Mistakes of users of ``pdcluster explain`` and ``plan``: each ends in one line with the value and the cure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from pdcluster_cli.__main__ import main

ROOT: Final = Path(__file__).resolve().parents[4]
EXAMPLE: Final = ROOT / "examples" / "cpu.yaml"
KUBECONFIG: Final[dict[str, Any]] = {
    "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1"}}],
    "contexts": [{"name": "c", "context": {"cluster": "k"}}, {"name": "d", "context": {"cluster": "gone"}}],
    "users": [],
    "current-context": "c",
}


def changed(**fields: object) -> dict[str, Any]:
    return {**yaml.safe_load(EXAMPLE.read_text()), **fields}


def with_spec(**fields: object) -> dict[str, Any]:
    return changed(spec={**changed()["spec"], **fields})


def line_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command ends with, beside argparse's usage."""
    try:
        status: object = main(words)
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    *usage, line = err.splitlines()
    assert not usage or usage[0].startswith("usage: ")
    return line


@pytest.mark.parametrize("command", ["plan", "explain"])
@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            changed(apiVersion="pdcluster.dev/v1beta1"),
            " has apiVersion pdcluster.dev/v1beta1, and this pdcluster reads pdcluster.dev/v1alpha1: "
            "use the pdcluster that knows pdcluster.dev/v1beta1, or write the other",
        ),
        (
            changed(metadata={"name": "a", "generation": "x"}),
            ": metadata.generation is x, and a whole number is wanted: leave it out",
        ),
        (
            {"kind": "List", "items": [changed(), changed()]},
            " has 2 objects of kind PDCluster: give them one at a time",
        ),
        ({"kind": "List", "items": []}, " has no object of kind PDCluster"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, command: str, document: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps(document))
    assert line_of([command, "-f", str(path)], capsys) == f"pdcluster {command}: {path}{said}"


@pytest.mark.parametrize("flag", ["-f", "--before"])
@pytest.mark.parametrize(
    ("document", "said"),
    [
        (with_spec(rooter=1), "spec.rooter: there is no such field: check its spelling, or take it out"),
        (with_spec(router={"replicas": "many"}), "spec.router.replicas is many: it should be a valid integer"),
        (with_spec(router={"replicas": 0}), "spec.router.replicas is 0: it should be greater than or equal to 1"),
        (changed(spec=7), "spec is 7: it should be a valid dictionary"),
    ],
)
def test_a_field_that_does_not_fit_is_told_with_its_file_and_value(
    tmp_path: Path, flag: str, document: object, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps(document))
    words = [flag, str(path)] + (["-f", str(EXAMPLE)] if flag == "--before" else [])
    assert line_of(["plan", *words], capsys).startswith(f"pdcluster plan: {path}: {said}")


def test_a_list_of_one_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(json.dumps({"kind": "List", "items": [changed()]}))
    assert main(["plan", "-f", str(path)]) == 0
    assert "nothing runs yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (json.dumps(KUBECONFIG), ["--context", "x"], "it has no context x: choose c or d with --context"),
        (
            json.dumps({**KUBECONFIG, "current-context": None}),
            [],
            "it has no current context: choose c or d with --context",
        ),
        (json.dumps({**KUBECONFIG, "contexts": []}), [], "it has no contexts: name another with --kubeconfig"),
        (
            json.dumps(KUBECONFIG),
            ["--context", "d"],
            "it cannot be used (Invalid kube-config file. Expected object with name gone in ",
        ),
        (": :\n- x", [], "it cannot be used (while parsing a block mapping"),
        ("", [], "it cannot be used ("),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named_with_the_cure(
    tmp_path: Path, text: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    line = line_of(["explain", "tiny", "--kubeconfig", str(path), *words], capsys)
    assert line.startswith(f"pdcluster explain: kubeconfig {path}: {said}")
    assert line.endswith(("with --context", "with --kubeconfig"))


def test_a_cluster_that_a_plan_would_not_ask_is_not_taken_silently(capsys: pytest.CaptureFixture[str]) -> None:
    line = line_of(["plan", "-f", str(EXAMPLE), "--context", "production"], capsys)
    assert line.endswith("--kubeconfig and --context say which cluster to compare with: give --from-cluster too")


@pytest.mark.parametrize("name", ["", "pdcluster/tiny"])
def test_no_name_is_asked_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = f"pdcluster explain: {name!r} is no name: give it without a kind, and its namespace with -n"
    assert line_of(["explain", name], capsys) == said
