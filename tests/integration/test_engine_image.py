"""``images/engine.sh`` is run as an image's builder runs it, on a Python with stand-ins for vLLM and Mooncake.

The stand-ins are packages that are there and do nothing: the script installs, looks and compiles; it imports neither.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import venv
import zipfile
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
NEEDED: Final = ("vllm", "msgspec", "aiohttp", "numpy", "zmq")
COMMAND: Final = "def main():\n    return 0\n"
CHECKED_HASH: Final = 0b11
"""The second word of such a .pyc (PEP 552)."""


def make_wheel(folder: Path, name: str, modules: dict[str, str], script: str = "") -> Path:
    """A wheel that pip installs without asking anybody."""
    info = f"{name}-1.0.dist-info"
    entry = f"[console_scripts]\n{script}\n" if script else ""
    files = {
        **modules,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry,
    }
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": "".join(f"{one},,\n" for one in files)}.items():
            wheel.writestr(file, text)
    return path


class Image:
    """A Python that stands for an image's, with wheels beside it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "python", with_pip=True)
        self.python = folder / "python" / "bin" / "python3"
        (self.modules,) = (folder / "python" / "lib").glob("python3*/site-packages")
        for name in NEEDED:
            (self.modules / name).mkdir()
            (self.modules / name / "__init__.py").write_text("")
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        ours = {f"pdcluster_{part}/__init__.py": COMMAND for part in ("cli", "connector")}
        make_wheel(self.wheels, "pdcluster", ours, "pdcluster = pdcluster_cli:main")
        self.mooncake = make_wheel(folder, "mooncake", {"mooncake/__init__.py": ""})

    def build(self) -> subprocess.CompletedProcess[str]:
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        told = {"WHEELS": str(self.wheels), "TRANSFER": str(self.mooncake), "PYTHON": str(self.python), "PATH": path}
        command = [str(ROOT / "images" / "engine.sh")]
        return subprocess.run(
            command, env={**os.environ, **told}, capture_output=True, text=True, timeout=120, check=False
        )

    def bytecode_of(self, module: str) -> Path:
        return Path(importlib.util.cache_from_source(str(self.modules / module)))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    found = Image(tmp_path_factory.mktemp("image"))
    (found.modules / "vllm" / "template.py").write_text("def {{ name }}():\n")
    done = found.build()
    assert done.returncode == 0, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("module", ["vllm/__init__.py", "numpy/__init__.py", "pdcluster_connector/__init__.py"])
def test_modules_are_compiled_and_their_bytecode_is_known_by_the_sources_hash(image: Image, module: str) -> None:
    found = image.bytecode_of(module).read_bytes()
    # pip compiles what it installs itself, by time; that is valid, and stays.
    is_pips = module.startswith("pdcluster")
    assert int.from_bytes(found[4:8], "little") == (0 if is_pips else CHECKED_HASH)


def test_a_start_compiles_nothing_and_writes_nothing(image: Image) -> None:
    program = f"import sys; sys.dont_write_bytecode = True; import {', '.join(NEEDED)}, pdcluster_connector"
    done = subprocess.run(
        [image.python, "-v", "-c", program], capture_output=True, text=True, check=True, timeout=60, cwd="/"
    )
    ours = [line for line in done.stderr.splitlines() if str(image.modules) in line]
    assert len([line for line in ours if "matches" in line]) >= len(NEEDED)
    assert [line for line in ours if "code object from '" in line and ".pyc" not in line] == []


def test_a_module_that_somebody_mounts_over_ours_is_the_one_that_runs(image: Image) -> None:
    module = image.modules / "zmq" / "__init__.py"
    before = module.stat()
    module.write_text("MINE = 1\n")
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:
        subprocess.run([image.python, "-B", "-c", "import zmq; zmq.MINE"], check=True, timeout=60)
    finally:
        module.write_text("")


def test_an_image_without_vllm_is_refused_with_the_cure(tmp_path: Path) -> None:
    found = Image(tmp_path)
    (found.modules / "vllm").rename(found.modules / "something_else")
    done = found.build()
    assert done.returncode == 1
    assert "missing: vllm" in done.stderr
    assert "--build-arg BASE=vllm/vllm-openai:TAG" in done.stderr
