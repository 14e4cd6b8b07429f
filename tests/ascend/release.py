"""The released vllm-ascend: its source distribution, fetched from the package index and kept in pdcluster's cache.

Nothing of it is in this repository. To be had without CANN and without a build its metadata is made with kernels off.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from pdcluster_cli.models.tiny_model import cache_root

RELEASE: Final = "0.23.0.post1"
SHA256: Final = "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1"
_NEEDED: Final = ("setuptools", "setuptools_scm", "cmake", "wheel")
_WITHOUT_KERNELS: Final = {"COMPILE_CUSTOM_KERNELS": "0", "SOC_VERSION": "ascend910b1"}


def released_sources() -> Path:
    """The folder with ``vllm_ascend`` and its ``egg-info``; 15 MB to fetch, once."""
    folder = cache_root(os.environ) / f"vllm_ascend-{RELEASE}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as made:
            _unpack(_fetched(Path(made)), Path(made))
            shutil.move(Path(made) / folder.name, folder)
    return folder


def _fetched(into: Path) -> Path:
    """The archive, whole and the one that was read."""
    venv = into / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "--quiet"]
    subprocess.run([*pip, "install", *_NEEDED], check=True)
    fetch = ["download", "--no-deps", "--no-build-isolation", f"vllm-ascend=={RELEASE}", "--dest", str(into)]
    subprocess.run([*pip, *fetch], check=True, env={**os.environ, **_WITHOUT_KERNELS})
    archive = into / f"vllm_ascend-{RELEASE}.tar.gz"
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert found == SHA256, f"{archive.name} has sha256 {found}, expected {SHA256}: read it anew before it is trusted"
    return archive


def _unpack(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
