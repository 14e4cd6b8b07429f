"""Writes the chart's made files: ``make chart``. A test checks that all of them are up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import yaml
from tools.chart.dashboard import dashboard
from tools.chart.documents import filled, rights_table, schema, values_table, values_yaml
from tools.crds import FOLDER as CRDS

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "charts" / "pdcluster"
RIGHTS: Final = CHART / "files" / "rights.yaml"
PAGE: Final = Path(__file__).with_name("readme.md")


def made_files() -> dict[Path, str]:
    """Every made file of the chart, with its text."""
    rights = yaml.safe_load(RIGHTS.read_text())
    page = PAGE.read_text()
    copies = {CHART / "files" / "crds" / crd.name: crd.read_text() for crd in sorted(CRDS.glob("*.yaml"))}
    return copies | {
        CHART / "values.yaml": values_yaml(),
        CHART / "values.schema.json": json.dumps(schema(), indent=2) + "\n",
        CHART / "README.md": filled(page, values=values_table(), rights=rights_table(rights)),
        CHART / "files" / "dashboard.json": json.dumps(dashboard(), indent=2) + "\n",
    }


def main() -> None:
    for path, text in made_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
