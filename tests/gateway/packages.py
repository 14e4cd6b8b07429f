"""Packages that never share an environment with the router: each is installed once, by hash, into a folder of its own.

The folders are in pdcluster's cache, under a name made from the lock's hash.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from patience import PATIENCE_S
from pdcluster_cli.models.tiny_model import cache_root

LOCKS: Final = Path(__file__).resolve().parents[2] / "requirements"


def folder_with(lock_name: str) -> Path:
    """The folder with what this lock in ``requirements`` names, installed if it is not there yet: some seconds. Waits
    for another process that installs it."""
    lock = LOCKS / lock_name
    folder = cache_root(os.environ) / lock.stem / hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if not folder.is_dir():
                _install(lock, folder)
    return folder


def _install(lock: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as making:
        made = Path(making) / "made"
        uv = str(Path(sys.executable).with_name("uv"))
        options = ["-q", "--target", str(made), "--no-deps", "--require-hashes", "-r", str(lock)]
        subprocess.run([uv, "pip", "install", *options], check=True, timeout=PATIENCE_S)
        made.rename(folder)
