"""One transport for all: what ends with a handle, and what ends with the transport."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest

from fakes.network import FakeNetwork, FakeTransport
from fakes.transports import Wrapped
from patience import EDGE_S, PATIENCE_S, until
from pdcluster_connector.transport import shared
from pdcluster_connector.transport.base import Transport, WriteId, WriteStatus
from pdcluster_connector.transport.shared import SharedSessions, SharedTransport, Use, _OpenTransport
from pdcluster_protocol.errors import ConfigError, TransferError

NUM_BYTES = 16
PASSED = 0.0
"""A deadline that has passed."""


class Bench:
    """Handles of one rank, and a peer that they may write to."""

    def __init__(self, use: Use) -> None:
        self.network = FakeNetwork()
        self.memory = ctypes.create_string_buffer(NUM_BYTES)
        self.made: list[FakeTransport] = []
        self.peer = self.network.join()
        self.peer.register(ctypes.addressof(self.memory), NUM_BYTES)
        self.sessions = SharedSessions(self.make, use)

    def make(self) -> FakeTransport:
        assert not any(made.is_open for made in self.made), "two at once"
        self.made.append(self.network.join())
        self.made[-1].register(ctypes.addressof(self.memory), NUM_BYTES)
        return self.made[-1]

    def open(self) -> SharedTransport:
        handle = self.sessions.open()
        assert isinstance(handle, SharedTransport)
        return handle

    def write(self, handle: SharedTransport) -> WriteId:
        address = ctypes.addressof(self.memory)
        return handle.submit_writes(self.peer.session, [(address, address, NUM_BYTES)])


def test_a_lane_that_has_written_all_leaves_the_others_their_transport() -> None:
    bench = Bench(Use.WRITES)
    first, second = bench.open(), bench.open()
    assert first.session == second.session
    assert first.write_status(bench.write(first)) is WriteStatus.DONE
    first.close()
    assert (first.is_open, second.is_open) == (False, True)
    assert second.write_status(bench.write(second)) is WriteStatus.DONE
    assert len(bench.made) == 1
    with pytest.raises(TransferError, match="is closed"):
        bench.write(first)


@pytest.mark.parametrize(
    ("use", "status", "ends"),
    [
        (Use.WRITES, WriteStatus.FAILED, True),
        (Use.WRITES, WriteStatus.LOST, True),
        (Use.WRITES_AND_KNOWS_THE_END, WriteStatus.FAILED, False),
        (Use.WRITES_AND_KNOWS_THE_END, WriteStatus.LOST, True),
    ],
)
def test_a_lane_ends_the_transport_if_a_write_may_still_read(use: Use, status: WriteStatus, *, ends: bool) -> None:
    bench = Bench(use)
    assert bench.sessions.close(time.monotonic() + PATIENCE_S)
    sessions = SharedSessions(lambda: EndingAs(bench.make(), status), use)
    handle = sessions.open()
    assert isinstance(handle, SharedTransport)
    assert handle.write_status(bench.write(handle)) is status
    handle.close()
    assert bench.made[-1].is_open is not ends


class EndingAs(Wrapped):
    """Every write ends so."""

    def __init__(self, inner: Transport, status: WriteStatus) -> None:
        super().__init__(inner)
        self._status = status

    def write_status(self, write: WriteId) -> WriteStatus:
        return self._status


def test_a_lane_that_closes_waits_for_a_write_that_still_ends_and_tells_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "LINGER_S", PATIENCE_S)
    bench = Bench(Use.WRITES)
    handle = bench.open()
    bench.network.hold()
    write = bench.write(handle)
    ending = threading.Timer(0.1, bench.network.release)
    ending.start()
    handle.close()
    ending.join()
    assert bench.made[0].is_open
    assert handle.write_status(write) is WriteStatus.DONE


def test_a_write_that_does_not_end_is_ended_with_the_transport_and_the_next_handle_gets_another() -> None:
    bench = Bench(Use.WRITES)
    stuck, other = bench.open(), bench.open()
    bench.network.hold()
    write = bench.write(stuck)
    stuck.close()
    assert stuck.write_status(write) is WriteStatus.FAILED
    assert not other.is_open
    with pytest.raises(TransferError, match="is closed"):
        bench.write(other)
    other.close()
    bench.network.release()
    after = bench.open()
    assert after.session != stuck.session
    assert after.write_status(bench.write(after)) is WriteStatus.DONE
    assert len(bench.made) == 2


@pytest.mark.parametrize(("use", "num_made"), [(Use.WRITES, 2), (Use.WRITES_AND_KNOWS_THE_END, 1)])
def test_a_failed_write_ends_with_the_transport_unless_a_failure_is_its_end(use: Use, num_made: int) -> None:
    bench = Bench(use)
    handle = bench.open()
    bench.network.fail_next()
    assert handle.write_status(bench.write(handle)) is WriteStatus.FAILED
    handle.close()
    bench.open()
    assert len(bench.made) == num_made


def test_a_failure_that_is_found_while_the_handle_closes_counts_too() -> None:
    bench = Bench(Use.WRITES)
    handle = bench.open()
    bench.network.fail_next()
    write = bench.write(handle)
    handle.close()
    assert handle.write_status(write) is WriteStatus.FAILED
    assert not bench.made[0].is_open


def test_closing_a_way_in_ends_what_every_peer_writes() -> None:
    bench = Bench(Use.LETS_IN)
    first, second = bench.open(), bench.open()
    first.close()
    assert not second.is_open
    assert bench.made[0].session not in bench.network._memories
    second.close()
    assert bench.open().session != first.session
    assert len(bench.made) == 2


def test_a_transport_that_is_going_to_be_closed_is_given_to_nobody_and_closed_before_the_next() -> None:
    bench = Bench(Use.LETS_IN)
    held = bench.open()
    bench.sessions.leave("another session")
    assert bench.open().session == held.session
    bench.sessions.leave(held.session)
    assert not held.is_open
    assert bench.made[0].is_open, "what was granted may still land"
    assert bench.open().session != held.session
    assert not bench.made[0].is_open


def test_at_the_end_everything_is_closed_and_nothing_is_opened_any_more() -> None:
    bench = Bench(Use.WRITES)
    handle = bench.open()
    assert bench.sessions.close(time.monotonic() + PATIENCE_S)
    assert not handle.is_open
    with pytest.raises(ConfigError, match="is closing"):
        bench.sessions.open()


class Gated(Wrapped):
    """Its close blocks until the gate is open."""

    def __init__(self, inner: Transport, gate: threading.Event) -> None:
        super().__init__(inner)
        self._gate = gate

    def close(self) -> None:
        assert self._gate.wait(EDGE_S)
        super().close()


def test_the_end_waits_no_longer_than_its_deadline_for_a_thread_that_closes_the_transport() -> None:
    network, gate = FakeNetwork(), threading.Event()
    sessions = SharedSessions(lambda: Gated(network.join(), gate), Use.LETS_IN)
    handle = sessions.open()
    closing = threading.Thread(target=handle.close)
    closing.start()
    assert until(lambda: not handle.is_open)
    assert not sessions.close(PASSED)
    assert handle.session in network._memories, "what was granted may still land"
    gate.set()
    assert sessions.close(time.monotonic() + PATIENCE_S)
    assert not network._memories
    closing.join()


def test_every_handle_is_shut_as_soon_as_the_end_begins() -> None:
    """A lane would go on giving writes to a transport that is being closed."""
    network, gate = FakeNetwork(), threading.Event()
    sessions = SharedSessions(lambda: Gated(network.join(), gate), Use.WRITES)
    handle = sessions.open()
    assert not sessions.close(PASSED)
    assert not handle.is_open
    gate.set()
    assert sessions.close(time.monotonic() + PATIENCE_S)


class NeverCloses(Wrapped):
    """A transport whose library raises."""

    def close(self) -> None:
        raise TransferError("the device does not answer")


@pytest.mark.parametrize("use", [Use.LETS_IN, Use.WRITES])
def test_a_handle_whose_transport_cannot_be_closed_is_never_called_closed(use: Use) -> None:
    bench = Bench(use)
    assert bench.sessions.close(time.monotonic() + PATIENCE_S)
    handle = SharedTransport(_OpenTransport(NeverCloses(bench.make())), use)
    bench.network.hold()
    bench.write(handle)
    for _ in range(3):
        with pytest.raises(TransferError, match="does not answer"):
            handle.close()
        assert not handle.is_open
    bench.network.release()
