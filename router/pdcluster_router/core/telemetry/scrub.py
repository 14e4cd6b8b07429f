"""Words from elsewhere, made fit for a log line or a client: no address, no token, one short line.

Reasons come from engines, from the operating system and, in calls that are refused, from callers without the secret.
"""

from __future__ import annotations

import re
from typing import Final

MAX_REASON_CHARS: Final = 1200
"""A refusal names both engines, every value that differs and, at its end, the cure: 350 to 1,100 characters."""

_HIDDEN: Final = (
    (re.compile(r"\b\d{1,11}\.[0-9a-f]{32}\b"), "<token>"),
    (re.compile(r"\b[a-z][a-z0-9+]{1,9}://[^\s\"'<>]+", re.IGNORECASE), "<address>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b"), "<address>"),
    (
        re.compile(r"\[?(?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])\]?(?::\d{1,5})?", re.IGNORECASE),
        "<address>",
    ),
)


def scrub(text: str) -> str:
    """``text`` without tokens, URLs and IP addresses: one line of ``MAX_REASON_CHARS`` printable characters at most."""
    short = text[: 2 * MAX_REASON_CHARS]
    for pattern, word in _HIDDEN:
        short = pattern.sub(word, short)
    line = " ".join(short.split())
    return printable(line)[:MAX_REASON_CHARS]


def printable(text: str) -> str:
    """``text`` with ``?`` for each character that is not printable, such as line ends and a terminal's commands."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
