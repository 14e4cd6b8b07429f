"""``python -m e2e [PYTEST ARGUMENTS]``: makes the tests' modules importable, then runs the stories."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    sys.exit(importlib.import_module("e2e.command").main(sys.argv[1:], os.environ))
