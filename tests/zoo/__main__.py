"""Writes ``docs/support.md``: ``python -m tests.zoo``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # as pytest's ``pythonpath``

from zoo.support import render  # noqa: E402  # the path first

if __name__ == "__main__":
    (ROOT / "docs" / "support.md").write_text(render())
