"""A shared library of a few hundred bytes that needs others, as a wheel for another device does."""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence
from typing import Final

_MACHINES: Final = {"x86_64": 62, "aarch64": 183}
_HEADER: Final = 64
_SEGMENT: Final = 56
_SYMBOL: Final = 24
_NEEDED, _HASH, _STRINGS, _SYMBOLS, _STRINGS_SIZE, _SYMBOL_SIZE = 1, 4, 5, 6, 10, 11


def library_that_needs(names: Sequence[str]) -> bytes:
    """An ELF object without any code. Its only symbol is the empty one.

    header | two segments | dynamic section | symbol table | hash table | names
    """
    text = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    places = [text.index(name.encode() + b"\0") for name in names]
    dynamic_at = _HEADER + 2 * _SEGMENT
    symbols_at = dynamic_at + 16 * (len(names) + 6)
    hash_at = symbols_at + _SYMBOL
    text_at = hash_at + 16
    entries = [*((_NEEDED, place) for place in places), (_HASH, hash_at), (_STRINGS, text_at), (_SYMBOLS, symbols_at)]
    entries += [(_STRINGS_SIZE, len(text)), (_SYMBOL_SIZE, _SYMBOL), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    whole = text_at + len(text)
    segments = _segment(1, 0, whole, 0x1000) + _segment(2, dynamic_at, len(dynamic), 8)
    return _header() + segments + dynamic + bytes(_SYMBOL) + struct.pack("<IIII", 1, 1, 0, 0) + text


def _header() -> bytes:
    """64 bits, little endian, a shared object for this machine."""
    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    machine = _MACHINES[platform.machine()]
    return ident + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, _HEADER, 0, 0, _HEADER, _SEGMENT, 2, 64, 0, 0)


def _segment(kind: int, offset: int, size: int, align: int) -> bytes:
    """Readable and writable, where it is in the file."""
    return struct.pack("<IIQQQQQQ", kind, 6, offset, offset, offset, size, size, align)
