"""``python -m tests.collector``: makes the tests' modules importable, then builds the OpenTelemetry collector."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(importlib.import_module("collector.binary").main())
