"""Writes ``crds/*.yaml`` and the reference pages from the API's models and the commands' settings: ``make crds``.

A test checks that the files are up to date.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import yaml
from tools.crd import KINDS, Kind, crd
from tools.reference import connector, errors, flags
from tools.reference.page import page

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "crds"
REFERENCE: Final = ROOT / "docs" / "reference" / "pdcluster.md"
HEADER: Final = "# Made from operator/pdcluster_operator/api by `make crds`.\n"


class Plain(yaml.SafeDumper):
    """Writes no anchors, but repeated parts in full: people read these files."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def file_of(kind: Kind) -> Path:
    """The CRD's file, named by group and plural, as in other projects."""
    document = crd(kind)
    return FOLDER / f"{document['spec']['group']}_{kind.plural}.yaml"


def text_of(kind: Kind) -> str:
    """The CRD as YAML, fields in the order of the models."""
    return HEADER + yaml.dump(crd(kind), Dumper=Plain, sort_keys=False, width=120, allow_unicode=True)


def page_of(command: str) -> str:
    """The reference page of a command."""
    return flags.page(command, flags.COMMANDS[command]) + (errors.section() if command == "router" else "")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for kind in KINDS:
        file_of(kind).write_text(text_of(kind))
    REFERENCE.parent.mkdir(exist_ok=True)
    REFERENCE.write_text(page())
    connector.FILE.write_text(connector.page())
    for command in flags.COMMANDS:
        flags.file_of(command).write_text(page_of(command))


if __name__ == "__main__":
    main()
