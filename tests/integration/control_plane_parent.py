"""Starts a control plane, says so, and waits to be killed: ``control_plane_parent.py FOLDER``. Not a test."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from control_plane.binaries import find_binaries
from control_plane.plane import ControlPlane


def main(folder: Path) -> None:
    with ControlPlane(find_binaries(os.environ), folder):
        print("ready", flush=True)
        signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
