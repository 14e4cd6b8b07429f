"""What the chart takes from elsewhere is fresh, and its three accounts of the values agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tools.chart.__main__ import made_files
from tools.chart.documents import filled, schema, values
from tools.chart.values import Values
from tools.crds import FOLDER as CRDS

from chart_cases.rendering import CHART, chart

MADE = made_files()


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.name)
def test_a_made_file_is_fresh(path: Path) -> None:
    assert path.read_text() == MADE[path], "run: make chart"


def test_the_chart_has_no_crd_that_nobody_makes() -> None:
    names = {path.name for path in (CHART / "files" / "crds").iterdir()}
    assert names == {path.name for path in CRDS.iterdir()}


def test_the_defaults_in_yaml_are_the_models() -> None:
    written = yaml.safe_load((CHART / "values.yaml").read_text())
    assert written == Values().model_dump(mode="json", by_alias=True)
    assert chart().values == written


def test_helm_has_the_schema_and_takes_the_defaults() -> None:
    assert chart().schema == schema()
    chart().validate_schema({})


def test_every_value_says_what_it_means() -> None:
    found = values()
    assert len(found) > 30
    assert [one.key for one in found if not one.description.endswith(".")] == []


def test_every_section_refuses_what_it_does_not_know() -> None:
    sections = [schema(), *(child for child in schema()["properties"].values() if "properties" in child)]
    assert len(sections) > 8
    assert [section for section in sections if section["additionalProperties"] is not False] == []


def test_a_page_without_a_tables_mark_is_not_written() -> None:
    assert filled("a\n<!-- values -->\nb\n", values="| x |") == "a\n| x |\nb\n"
    with pytest.raises(KeyError):
        filled("a\n", values="| x |")
