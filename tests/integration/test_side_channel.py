"""How the side channel's sockets wait."""

from __future__ import annotations

import time

from integration.ranks import SECRET
from pdcluster_connector.side_channel import DecodeChannel, Wakeup
from pdcluster_protocol.ids import BootId


def test_a_wait_shorter_than_a_millisecond_is_a_wait() -> None:
    """zmq waits in whole milliseconds: rounded to none, a lane that looks often burns a core."""
    wakeup = Wakeup()
    with DecodeChannel("127.0.0.1", 0, BootId("b"), SECRET, wakeup) as channel:
        begun_at = time.monotonic()
        for _ in range(20):
            channel.wait(0.0004)
        assert time.monotonic() - begun_at >= 20 * 0.0004
    wakeup.close()


def test_no_time_left_is_no_wait_and_a_wakeup_ends_a_long_one() -> None:
    wakeup = Wakeup()
    with DecodeChannel("127.0.0.1", 0, BootId("b"), SECRET, wakeup) as channel:
        channel.wait(-1.0)
        wakeup.set()
        begun_at = time.monotonic()
        channel.wait(60.0)
        assert time.monotonic() - begun_at < 30
    wakeup.close()
