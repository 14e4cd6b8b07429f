"""The command behind ``make e2e``: the stories, on a node in a box, or on the cluster of ``$KUBECONFIG``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from control_plane.binaries import BuildError, build_binaries
from control_plane.recipe import NODE, PLANE
from e2e.box import BoxError, run_in_box
from e2e.images import make_images
from e2e.layers import LayerError
from e2e.readable import UMASK, ensure_readable_model
from e2e.warm import ensure_warm
from pdcluster_cli.models.tiny_model import cache_root

ROOT: Final = Path(__file__).resolve().parents[1]
_PYTEST: Final = ("-v", "-s", "-p", "no:cacheprovider", "--durations=0", "--durations-min=1")
"""What stories print is what they measured; every story's seconds are told at the end."""


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """pytest's exit status; 2 when there is nothing to run it on."""
    os.umask(UMASK)
    pytest = pytest_command(words)
    if environ.get("KUBECONFIG"):
        return subprocess.run(pytest, cwd=ROOT).returncode
    cache = cache_root(environ) / "e2e"
    try:
        build_binaries(environ, _say_on, programs=(*PLANE, *NODE))
        make_images(cache / "layers", _say)
        ensure_readable_model(cache)
        ensure_warm(cache, _say)
        return run_in_box(cache / "runs", pytest)
    except (BoxError, BuildError, LayerError) as error:
        print(f"pdcluster: {error}", file=sys.stderr)
        return 2


def pytest_command(words: Sequence[str]) -> list[str]:
    """All stories, unless ``words`` name some: ``e2e/test_node.py::test_a`` does, ``-k engine`` chooses among all."""
    named = [ROOT / word.split("::")[0] for word in words]
    names_some = any(path.is_relative_to(ROOT / "e2e") and path.exists() for path in named)
    return [sys.executable, "-m", "pytest", *_PYTEST, *words, *([] if names_some else ["e2e"])]


def _say(line: str) -> None:
    print(line, flush=True)


def _say_on(text: str) -> None:
    print(text, end="", flush=True)
