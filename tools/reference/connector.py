"""The page of the connector's settings, made from their docstrings."""

from __future__ import annotations

import ast
import inspect
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from pdcluster_connector.settings import Settings

FILE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "connector.md"
HEAD: Final = """# Settings of the connector

Made from `connector/pdcluster_connector/settings.py` by `make crds`.

Keys of `kv_connector_extra_config` in an engine's `--kv-transfer-config`. Unknown keys are refused by name. Times are
seconds. Where an explanation begins with a role, only that role uses the key.

| key | default | what it is, and why the default is so |
|---|---|---|
"""


def page() -> str:
    told = docstrings()
    fields = msgspec.structs.fields(Settings)
    rows = [f"| `{field.name}` | {_default(field.default)} | {_cell(told[field.name])} |" for field in fields]
    return HEAD + "\n".join([*rows, ""])


def docstrings() -> dict[str, str]:
    """Docstring of each field: the string below it."""
    body = ast.parse(inspect.getsource(Settings)).body[0]
    assert isinstance(body, ast.ClassDef)
    return dict(_told(field, below) for field, below in pairwise(body.body) if isinstance(field, ast.AnnAssign))


def _told(field: ast.AnnAssign, below: ast.stmt) -> tuple[str, str]:
    text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
    return ast.unparse(field.target), " ".join(text.split())


def _default(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")
