"""Engines' modules, compiled once: pods have them from the node read-only, and would compile them at every start."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

from e2e.layers import Say
from pdcluster_cli.engines import ENGINE_MODULE, PRELOAD_CPU

_LAST: Final = PRELOAD_CPU[-1]
"""Imported after all others: when it has bytecode, so have they."""
_LIMIT_S: Final = 600.0


def ensure_bytecode(say: Say) -> None:
    """It is there, beside the modules. Seconds, the first time."""
    if not _is_compiled(_LAST):
        say("pdcluster: compiling what engines import (once)")
        words = f"import {', '.join((ENGINE_MODULE, *PRELOAD_CPU))}"
        subprocess.run([sys.executable, "-c", words], capture_output=True, check=True, timeout=_LIMIT_S)


def _is_compiled(module: str) -> bool:
    """Without importing it: its package's folder says where it is."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None, f"{package} is no package"
    source = Path(spec.origin).parent.joinpath(*rest).with_suffix(".py")
    return Path(importlib.util.cache_from_source(str(source))).exists()
