"""Programs for tests that are built from Go modules, once for each version of their sources.

A program is a folder with ``main.go``, ``go.mod`` and ``go.sum``. It is kept in pdcluster's cache, under a name made
from their hash.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from control_plane.binaries import BuildError, NotBuiltError, find_go
from control_plane.recipe import needed_go
from pdcluster_cli.models.tiny_model import cache_root

BUILD_LIMIT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class GoProgram:
    """``title``: in messages. ``folder``: its sources; its name is the program's in the cache."""

    title: str
    folder: Path

    def find(self) -> Path:
        """The program.

        Raises:
            NotBuiltError: It is not built.
        """
        if not self.place().is_file():
            raise NotBuiltError(f"{self.title} is not built yet: make kube (about two minutes, once)")
        return self.place()

    def place(self) -> Path:
        """Where this version is kept; it may not be built yet."""
        sources = b"\0".join((self.folder / name).read_bytes() for name in ("main.go", "go.mod", "go.sum"))
        return cache_root(os.environ) / self.folder.name / hashlib.sha256(sources).hexdigest()[:12]

    def build(self) -> None:
        """The program is there.

        Raises:
            BuildError: No Go, no module, or no success.
        """
        wanted = self.place()
        if wanted.is_file():
            return
        wanted.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=wanted.parent) as making:
            made = Path(making) / "made"
            go = str(find_go(os.environ, needed_go((self.folder / "go.mod").read_text())))
            command = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", str(made), "."]
            env = {**os.environ, "GOTOOLCHAIN": "local", "GOWORK": "off", "CGO_ENABLED": "0"}
            done = subprocess.run(
                command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=BUILD_LIMIT_S
            )
            if done.returncode != 0:
                raise BuildError(f"{self.title} could not be built:\n{done.stderr[-2000:]}")
            made.rename(wanted)

    def build_or_say(self) -> int:
        """The status of a program that only builds it."""
        try:
            self.build()
        except BuildError as error:
            print(f"pdcluster: {error}", file=sys.stderr)
            return 1
        return 0
