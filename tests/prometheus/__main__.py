"""``python -m tests.prometheus``: makes the tests' modules importable, then builds the program of ``main.go``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(importlib.import_module("prometheus.evaluation").PROMETHEUS.build_or_say())
