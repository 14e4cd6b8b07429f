"""The pages of a command's flags, made from its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pdcluster_operator.settings import FLAGS as OPERATOR
from pdcluster_protocol.flags import Flags
from pdcluster_router.settings import FLAGS as ROUTER

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "reference"
COMMANDS: Final = {"router": ROUTER, "operator": OPERATOR}


def file_of(command: str) -> Path:
    return FOLDER / f"{command}.md"


def page(command: str, flags: Flags) -> str:
    rows = [f"| `{flag}` | {default} | {bounds} | {_cell(reason)} |" for flag, default, bounds, reason in flags.rows()]
    head = [
        f"# Flags of `pdcluster {command}`",
        "",
        f"Made from `{command}/pdcluster_{command}/settings.py` by `make crds`.",
        "",
        "| flag | default | bounds | what it is, and why the default is so |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def _cell(reason: str) -> str:
    return reason.replace("``", "`").replace("|", "\\|")
