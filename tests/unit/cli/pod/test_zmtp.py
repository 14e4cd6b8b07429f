"""One question to a side channel: what talks without an answer is left in time."""

from __future__ import annotations

import time
from typing import Final

import pytest

from fakes.talker import talking
from patience import PATIENCE_S
from pdcluster_cli.pod.zmtp import NotZmtp, ask_router

GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
COMMAND: Final = b"\x04\x00"


def ask(port: int, timeout_s: float) -> bytes:
    return ask_router("127.0.0.1", port, b"?", deadline=time.monotonic() + timeout_s)


def test_commands_without_an_end_are_no_answer() -> None:
    with talking(GREETING, COMMAND * 500) as port, pytest.raises(NotZmtp, match="more than 16 commands"):
        ask(port, PATIENCE_S)


def test_a_frame_that_drips_is_late_as_a_whole() -> None:
    with talking(GREETING + b"\x00\xff", b"x", every_s=0.02) as port, pytest.raises(TimeoutError):
        ask(port, 0.5)
