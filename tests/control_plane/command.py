"""The command behind ``make kube``: what the control plane's tests need is built, or was already."""

from __future__ import annotations

import os
import sys

from control_plane.binaries import BuildError, build_binaries
from control_plane.recipe import KUBECTL, PLANE


def main() -> int:
    """The exit status. One line when there was something to do, none else."""
    try:
        build_binaries(os.environ, say=lambda text: print(text, end="", flush=True), programs=(*PLANE, KUBECTL))
    except BuildError as error:
        print(f"\npdcluster: {error}", file=sys.stderr)
        return 1
    return 0
