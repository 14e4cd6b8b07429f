"""Types of argparse for numbers. An error says what was given and what to give."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Final

_LAST_PORT: Final = 65535
_MOST_RANKS: Final = 1024
_MOST_DIGITS: Final = 100


def whole(what: str, least: int, most: int) -> Callable[[str], int]:
    """A whole number from ``least`` to ``most``. ``what`` begins the error; ``{}`` in it stands for the given word."""

    def read(text: str) -> int:
        if not (is_whole(text) and least <= int(text) <= most):
            raise ArgumentTypeError(f"{what.format(text)}: use {least} to {most}")
        return int(text)

    return read


def seconds(least: float, most: float) -> Callable[[str], float]:
    """Seconds from ``least`` to ``most``."""

    def read(text: str) -> float:
        if not least <= (number := _float(text)) <= most:
            raise ArgumentTypeError(f"{text} seconds: use {least:g} to {most:.0f}")
        return number

    return read


def is_whole(text: str) -> bool:
    """Whether ``int`` takes it: digits of ASCII, and not so many that Python refuses them."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


port: Final = whole("port {}", 1, _LAST_PORT)
ranks: Final = whole("{} ranks", 1, _MOST_RANKS)
