"""A CUDA library keeps its code for one chip: a file with the layout that ``thin`` names."""

from __future__ import annotations

import struct

from tools.device_check.thin import thin

NAMES = b"\0.text\0.nv_fatbin\0.names\0"
HEAD = 64


def entry(chip: int, code: bytes) -> bytes:
    return struct.pack("<HHIQ12sI32x", 2, 0x101, 64, len(code), b"", chip) + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*sections: tuple[bytes, bytes]) -> bytearray:
    """An ELF file: header, sections, their names, the table of sections."""
    bodies, places, at = b"", [], HEAD
    for name, body in (*sections, (b".names", NAMES)):
        places.append((NAMES.index(b"\0" + name + b"\0") + 1, at, len(body)))
        bodies, at = bodies + body, at + len(body)
    table = b"".join(struct.pack("<IIQQQQ24x", name, 0, 0, 0, begin, size) for name, begin, size in places)
    head = bytearray(HEAD)
    struct.pack_into("<Q", head, 0x28, at)
    struct.pack_into("<HHH", head, 0x3A, 64, len(places), len(places) - 1)
    return head + bodies + table


def test_code_for_other_chips_becomes_zeros_and_nothing_else_changes() -> None:
    def made(others: bytes) -> bytearray:
        first = container(entry(80, others), entry(90, b"for 90"), entry(120, others))
        fat = first + b"\0" * 8 + container(entry(90, b"more for 90"))
        return library((b".text", container(entry(80, b"no code of a GPU"))), (b".nv_fatbin", fat))

    one = made(b"others'")
    assert thin(one, 90) == (len(b"for 90more for 90"), 2 * len(b"others'"))
    assert one == made(bytes(len(b"others'")))


def test_a_library_without_code_for_the_chip_keeps_none() -> None:
    assert thin(library((b".nv_fatbin", container(entry(80, b"code")))), 90) == (0, 4)
