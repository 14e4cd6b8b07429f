"""The pages of a command's flags, made from its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pdcluster_operator.settings import FLAGS as OPERATOR
from pdcluster_protocol.flags import Flags
from pdcluster_router.front.setting_changes import TAKEN
from pdcluster_router.settings.router_settings import FLAGS as ROUTER

FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "reference"
COMMANDS: Final = {"router": ROUTER, "operator": OPERATOR}
TAKEN_BY: Final = {"router": frozenset(map(ROUTER.of, TAKEN))}
"""The flags that a running process of this command takes anew."""


def file_of(command: str) -> Path:
    return FOLDER / f"{command}.md"


_SOURCES = {"router": "settings/"}
"""By command, where its settings are. All others have one file."""


def page(command: str, flags: Flags) -> str:
    rows = [
        f"| `{flag}` | {default} | {bounds} |{_when(flag, command)} {_cell(reason)} |"
        for flag, default, bounds, reason in flags.rows()
    ]
    when, line = (" on SIGHUP |", "---|") if command in TAKEN_BY else ("", "")
    head = [
        f"# Flags of `pdcluster {command}`",
        "",
        f"Made from `{command}/pdcluster_{command}/{_SOURCES.get(command, 'settings.py')}` by `make crds`.",
        "",
        *_other_ways(flags),
        f"| flag | default | bounds |{when} what it is, and why the default is so |",
        f"|---|---|---|{line}---|",
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
        "SIGHUP has the file read anew: what the table calls taken holds from then on.",
    ]
    return [" ".join(ways), ""]


def _when(flag: str, command: str) -> str:
    """The cell that says whether a running process takes another value."""
    if command not in TAKEN_BY:
        return ""
    return " taken |" if flag in TAKEN_BY[command] else " |"


def _cell(reason: str) -> str:
    return reason.replace("``", "`").replace("|", "\\|")
