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
        *_other_ways(flags),
        "| flag | default | bounds | what it is, and why the default is so |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def _other_ways(flags: Flags) -> list[str]:
    if not flags.prefix:
        return []
    ways = [
        f"`--idle-timeout 60` may also be a variable, `{flags.prefix}IDLE_TIMEOUT=60`, or a line `idle-timeout = 60`",
        "of the TOML file that `--settings` names; so may every flag. A flag counts before its variable, and that",
        'before the file. A list is written `prefill = ["http://a:1", "http://b:1"]` in the file, and with commas in',
        "a variable.",
    ]
    return [" ".join(ways), ""]


def _cell(reason: str) -> str:
    return reason.replace("``", "`").replace("|", "\\|")
