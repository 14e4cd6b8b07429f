"""Writes a benchmark's page into ``docs/``, with what it was measured on. Every program's ``--write``."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[1] / "docs"


def write_page(name: str, title: str, body: str, folder: Path = DOCS, flags: str = "") -> Path:
    """A page in ``folder`` holds the title, when and on what it was measured, and the body. ``flags``: see below.

    The page has its program's name, with hyphens: ``step_time`` writes ``step-time.md``.
    """
    path = folder / f"{name.replace('_', '-')}.md"
    path.write_text(f"# {title}\n\n{measured_by(name, flags)}\n{body.strip()}\n")
    return path


def measured_by(name: str, flags: str = "") -> str:
    """When, where and by which program a page's figures came to be. ``flags``: those that are not its defaults."""
    today, cores = datetime.datetime.now(datetime.UTC), os.cpu_count()
    command = " ".join(["python", "-m", f"benchmarks.{name}", *flags.split(), "--write"])
    return f"Measured on {today:%Y-%m-%d} with {cores} cores by `{command}`."


def format_minutes(seconds: float) -> str:
    """Rounded, for the estimate that each program prints first. Example: 95 → "about 2 minutes"."""
    minutes = max(1, round(seconds / 60))
    return f"about {minutes} minute{'s' if minutes > 1 else ''}"
