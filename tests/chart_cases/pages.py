"""The pages on Kubernetes and the commands that they tell a reader to type, in words as a shell splits them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
QUICK_START: Final = ROOT / "docs" / "kubernetes.md"
OPERATIONS: Final = ROOT / "docs" / "kubernetes-operations.md"

Words = list[str]


def commands_of(page: Path) -> list[Words]:
    """In the order of the page; a line that ends with a backslash goes on in the next one."""
    text = page.read_text().replace("\\\n", "")
    return [shlex.split(line) for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE)]


def of(program: str, *pages: Path) -> list[Words]:
    """The commands of one program; of both pages if none is named."""
    return [words for page in pages or (QUICK_START, OPERATIONS) for words in commands_of(page) if words[0] == program]


def after(words: Words, flag: str) -> Words:
    """The word behind each ``flag``."""
    return [words[place + 1] for place, word in enumerate(words) if word == flag]
