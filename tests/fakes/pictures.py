"""Pictures for tests: noise of any size as a PNG, the same for the same seed. Needs no library."""

from __future__ import annotations

import base64
import random
import struct
import zlib


def png(width: int, height: int, seed: int) -> bytes:
    """``width`` x ``height`` pixels, RGB of 8 bits (PNG, ISO/IEC 15948)."""
    rng = random.Random(seed)
    rows = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_part(name, content) for name, content in parts)


def data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _part(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
