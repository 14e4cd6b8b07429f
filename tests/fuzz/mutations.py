"""How a valid message is spoiled: by bits, by bytes, by length, by field, by type, by size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import msgspec

_ODD_VALUES: Final[tuple[object, ...]] = (
    None, True, -1, 0, 1, 2**31, 2**63 - 1, 1.5, "", "x" * 300, "\x00", b"\xff" * 20, [], [[]], [1, "a"], {}, {"a": 1},
)  # fmt: skip


def spoil_bytes(rng: random.Random, frame: bytes) -> bytes:
    """A few bits, bytes or lengths of ``frame`` are wrong."""
    spoil: Callable[[random.Random, bytearray], bytearray] = rng.choice((_flip, _cut, _insert, _repeat, _replace))
    return bytes(spoil(rng, bytearray(frame)))


def spoil_fields(rng: random.Random, fields: dict[str, object]) -> dict[str, object]:
    """A field is gone, new, renamed or of another type; sometimes several."""
    spoiled = dict(fields)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        name = rng.choice(list(spoiled) or ["type"])
        match rng.randrange(4):
            case 0:
                spoiled.pop(name, None)
            case 1:
                spoiled[rng.choice(("extra", "Type", "", "version", name + "_"))] = rng.choice(_ODD_VALUES)
            case _:
                spoiled[name] = rng.choice(_ODD_VALUES)
    return spoiled


def noise(rng: random.Random) -> bytes:
    """Bytes without any form."""
    return rng.randbytes(rng.choice((0, 1, 2, 16, 17, 18, 64, 500)))


def pack(fields: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode(fields)


def _flip(rng: random.Random, frame: bytearray) -> bytearray:
    for _ in range(rng.choice((1, 1, 2, 8))):
        if frame:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return frame


def _cut(rng: random.Random, frame: bytearray) -> bytearray:
    return frame[: rng.randrange(len(frame) + 1)]


def _insert(rng: random.Random, frame: bytearray) -> bytearray:
    where = rng.randrange(len(frame) + 1)
    return frame[:where] + bytearray(rng.randbytes(rng.randrange(1, 9))) + frame[where:]


def _repeat(rng: random.Random, frame: bytearray) -> bytearray:
    return frame * rng.choice((2, 3))


def _replace(rng: random.Random, frame: bytearray) -> bytearray:
    where = rng.randrange(len(frame) + 1)
    tail = rng.randbytes(len(frame) - where)
    return frame[:where] + bytearray(tail)
