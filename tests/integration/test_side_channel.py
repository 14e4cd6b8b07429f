"""How the side channel's sockets wait, and how they tell that a connection was lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import zmq

from integration.far_ranks import far_decode
from integration.harness import eventually
from integration.ranks import SECRET, Shape
from patience import PATIENCE_S
from pdcluster_connector.settings import Settings
from pdcluster_connector.side_channel import DecodeChannel, PrefillChannel, Wakeup
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.params import SideChannelAddress
from pdcluster_protocol.side_channel import MAX_FRAME_BYTES

SILENT_S = 1.5


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


def test_an_end_that_answers_no_heartbeat_is_lost_and_one_that_is_only_busy_is_not() -> None:
    """A machine without power says no farewell; a receiver that hears nothing for a while is no such machine."""
    with far_decode(Shape(), Settings()) as far, busy_end() as busy, ExitStack() as stack:
        # On a crowded machine one may be lost for want of a core; with a wrong heartbeat each is.
        watchers = (stack.enter_context(watched(far.address)) for _ in range(3))
        watcher = next(one for one in watchers if not is_lost(one, 2 * SILENT_S))
        stopped_at = time.monotonic()
        far.signal(signal.SIGSTOP)
        assert is_lost(watcher, PATIENCE_S)
        assert time.monotonic() - stopped_at > SILENT_S / 2, "two heartbeats may come late"
        assert not busy.take_loss()


def test_a_loss_is_known_within_the_time_that_was_asked_for() -> None:
    """ZeroMQ counts an answer's time from the next heartbeat on."""
    with busy_end() as channel:
        waits_ms = [channel._socket.getsockopt(option) for option in (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT)]
    assert 0 < sum(map(int, waits_ms)) <= SILENT_S * 1000


def test_an_end_that_closes_is_lost_and_told_once() -> None:
    ending = DecodeChannel("127.0.0.1", 0, BootId("b"), SECRET, Wakeup())
    with watched(SideChannelAddress("127.0.0.1", ending.port, BootId("b"))) as watcher:
        assert not is_lost(watcher, 0.2)
        ending.close()
        assert is_lost(watcher, PATIENCE_S)
        assert not watcher.take_loss()


def test_a_frame_over_the_bound_costs_its_sender_the_connection() -> None:
    """It is refused by its announced length: decode never holds it."""
    with busy_end() as channel:
        channel._socket.send(bytes(MAX_FRAME_BYTES))
        assert not is_lost(channel, 1.0)
        channel._socket.send(bytes(MAX_FRAME_BYTES + 1))
        assert is_lost(channel, PATIENCE_S)


def test_a_loss_wakes_who_waits() -> None:
    ending = DecodeChannel("127.0.0.1", 0, BootId("b"), SECRET, Wakeup())
    with watched(SideChannelAddress("127.0.0.1", ending.port, BootId("b"))) as watcher:
        watcher.wait(0.5)
        ending.close()
        begun_at = time.monotonic()
        watcher.wait(60)
        assert time.monotonic() - begun_at < 30
        assert watcher.take_loss()


def test_closed_channels_leave_no_descriptor() -> None:
    with DecodeChannel("127.0.0.1", 0, BootId("b"), SECRET, Wakeup()) as channel:
        address = SideChannelAddress("127.0.0.1", channel.port, BootId("b"))
        kept = [*closed_channels(1, address)]
        time.sleep(0.5)  # ZeroMQ closes in a thread of its own
        before = num_open()
        kept += closed_channels(40, address)
        assert eventually(lambda: num_open() < before + 40)


def closed_channels(count: int, address: SideChannelAddress) -> Iterator[PrefillChannel]:
    """They are to be kept, or Python itself would close what they forget."""
    for _ in range(count):
        with watched(address) as channel:
            yield channel


def num_open() -> int:
    """Descriptors."""
    return len([*Path("/proc/self/fd").iterdir()])


@contextmanager
def busy_end() -> Iterator[PrefillChannel]:
    """Connected to a decode rank that never looks at what it was told."""
    with (
        DecodeChannel("127.0.0.1", 0, BootId("busy"), SECRET, Wakeup()) as channel,
        watched(SideChannelAddress("127.0.0.1", channel.port, BootId("busy"))) as watcher,
    ):
        yield watcher


@contextmanager
def watched(address: SideChannelAddress) -> Iterator[PrefillChannel]:
    wakeup = Wakeup()
    with PrefillChannel(address, b"prefill", SECRET, wakeup, silent_s=SILENT_S) as channel:
        yield channel
    wakeup.close()


def is_lost(channel: PrefillChannel, limit_s: float) -> bool:
    """Within so many seconds."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        channel.wait(0.05)
        if channel.take_loss():
            return True
    return False
