"""How the file of a PDCluster is read: as kubectl reads it, and as the API server would refuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import yaml

from pdcluster_cli.cluster.documents import Unreadable, parse_cluster, read_file

ROOT: Final = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("2026-11-22", "2026-11-22"), ("22:30", "22:30"), ("1:30.5", "1:30.5"), ("12", 12), ("-7", -7), ("010", 8),
        ("0x1F", 31), ("1e3", 1000), ("1.5", 1.5), (".5", 0.5), ("1.0", 1), ("32_768", 32768), ("0o", "0o"),
        ("1_0.5", 10.5), ("0x_", "0x_"), ("true", True), ("'1'", "1"), ("{2: x, true: y}", {"2": "x", "true": "y"}),
        ("~", None),
    ],
)  # fmt: skip
def test_a_file_is_read_as_kubectl_reads_it(tmp_path: Path, written: str, read: object) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(f"kind: PDCluster\nmetadata: {{name: a}}\nvalue: {written}\n")
    value = read_file(str(path))["value"]
    assert (value, type(value)) == (read, type(read))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (
            "{name: My_Pool}",
            "metadata.name is My_Pool, 7 characters: Services are named after it, so use at most 63 of a-z, 0-9 and -, "
            "a letter first and no - at the end",
        ),
        ("{name: 1}", "metadata.name: 1 is a number, and text is wanted: quote it"),
        ("{name: on}", "metadata.name: true is read as true or false, and text is wanted: quote it"),
        ("{name: [a]}", "metadata.name: text is wanted: give it in quotes"),
        (
            "{name: a, namespace: team_a}",
            "metadata.namespace is team_a, 6 characters: use at most 63 of a-z, 0-9 and -, no - at either end",
        ),
        ("{name: a, namespace: 7}", "metadata.namespace: 7 is a number, and text is wanted: quote it"),
        (
            "{name: a, labels: {team: 7, a: b}, annotations: {c: 1.5}}",
            "metadata.labels.team: 7 is a number, and text is wanted: quote it; "
            "metadata.annotations.c: 1.5 is a number, and text is wanted: quote it",
        ),
        ("{name: a, labels: [b]}", "metadata.labels: names with values are wanted, one a line"),
    ],
)
def test_names_that_the_api_server_would_refuse_are_refused_offline_with_the_cure(
    tmp_path: Path, metadata: str, said: str
) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(f"kind: PDCluster\nmetadata: {metadata}\n")
    with pytest.raises(Unreadable) as caught:
        read_file(str(path))
    assert str(caught.value) == f"{path}: {said}"


@pytest.mark.parametrize("metadata", ["{name: a1-b}", "{name: a, namespace: 7-a}", "{name: a, namespace: , labels: }"])
def test_names_that_the_api_server_takes_are_taken(tmp_path: Path, metadata: str) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(f"kind: PDCluster\nmetadata: {metadata}\n")
    assert read_file(str(path))


def test_a_number_where_text_is_wanted_is_refused_with_the_cure() -> None:
    example = yaml.safe_load((ROOT / "examples" / "cpu.yaml").read_text())
    example["spec"]["roles"]["prefill"] |= {"engineArgs": {"max-model-len": 8192, "enforce-eager": True}}
    with pytest.raises(Unreadable) as caught:
        parse_cluster(example, "pool.yaml")
    where = "spec.roles.prefill.engineArgs"
    assert str(caught.value) == (
        f"pool.yaml: {where}.max-model-len: 8192 is a number, and text is wanted: quote it; "
        f"{where}.enforce-eager: true is read as true or false, and text is wanted: quote it"
    )


def test_aliases_that_stand_for_more_than_memory_holds_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 40))]
    path = tmp_path / "pool.yaml"
    path.write_text("kind: PDCluster\nmetadata: {name: a}\n" + "\n".join(lines))
    with pytest.raises(Unreadable, match="has more than 100000 values, its aliases written out"):
        read_file(str(path))


def test_merges_that_stand_for_more_than_memory_holds_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 40))]
    path = tmp_path / "pool.yaml"
    path.write_text("kind: PDCluster\nmetadata: {name: a}\n" + "\n".join(lines))
    with pytest.raises(Unreadable, match="it merges more than 100000 keys"):
        read_file(str(path))
    path.write_text("kind: PDCluster\nmetadata: {name: a}\nx: &x {a: 1}\ny: {<<: *x, b: 2}\n")
    assert read_file(str(path))["y"] == {"a": 1, "b": 2}


def test_a_long_text_that_aliases_repeat_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(f"kind: PDCluster\nmetadata: {{name: a}}\nx: &x {'x' * 20_000}\ny: [{', '.join(['*x'] * 2000)}]\n")
    with pytest.raises(Unreadable, match="has more than 100000 values"):
        read_file(str(path))


def test_a_few_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("kind: PDCluster\nmetadata: {name: a}\nx: &x {a: [1, 2]}\ny: [*x, *x]\n")
    assert read_file(str(path))["y"] == [{"a": [1, 2]}] * 2


def test_an_alias_within_what_it_stands_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("kind: PDCluster\nmetadata: {name: a}\nx: &x [*x]\n")
    with pytest.raises(Unreadable, match="Circular reference"):
        read_file(str(path))
