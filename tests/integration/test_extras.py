"""Each extra of the package can be installed: its requirements have a solution on the package index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OVERRIDE = ("--override", "requirements/overrides.txt")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("extras", "options"),
    [
        (["router"], ()),
        (["router", "otlp", "picker", "jwt"], ()),
        (["operator"], ()),
        (["router", "operator"], ()),
        (["router", "connector", "cpu"], OVERRIDE),
        (["router", "connector", "cuda"], ()),
        (["router", "connector", "ascend"], ()),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_an_extra_resolves(extras: list[str], options: tuple[str, ...], tmp_path: Path) -> None:
    uv, resolved = str(Path(sys.executable).with_name("uv")), tmp_path / "resolved.txt"
    wanted = [word for extra in extras for word in ("--extra", extra)]
    command = [uv, "pip", "compile", "-q", "pyproject.toml", *wanted, *options, "-o", str(resolved)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "msgspec==" in resolved.read_text()
