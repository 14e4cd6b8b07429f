"""Writes wait for a sign of life of their peer, and lanes do not."""

from __future__ import annotations

import threading

import pytest

from patience import PATIENCE_S
from pdcluster_connector.transport.base import WriteId
from pdcluster_connector.transport.opening import Backend, Openings, Write
from pdcluster_protocol.errors import TransferError

WAIT_S = PATIENCE_S


class Peers:
    """Peers that answer a probe when told to. Owns what was delivered and refused."""

    def __init__(self) -> None:
        self.answers = {"a": threading.Event(), "b": threading.Event()}
        self.is_alive = True
        self.failure: Exception | None = None
        self.num_probes = 0
        self.delivered: list[WriteId] = []
        self.refused: list[WriteId] = []
        self.settled = threading.Semaphore(0)
        self.openings = Openings(Backend(self._probe, self._deliver, self._refuse))

    def write(self, number: int, session: str = "a") -> None:
        self.openings.defer(Write(WriteId(number), session, [(0, 0, 1)]))

    def wait_settled(self, count: int) -> None:
        for _ in range(count):
            assert self.settled.acquire(timeout=WAIT_S)

    def _probe(self, session: str) -> bool:
        self.num_probes += 1
        if self.failure:
            raise self.failure
        assert self.answers[session].wait(WAIT_S)
        return self.is_alive

    def _deliver(self, write: Write) -> None:
        self.delivered.append(write.id)
        self.settled.release()

    def _refuse(self, write: Write) -> None:
        self.refused.append(write.id)
        self.settled.release()


def test_a_write_whose_peer_cannot_be_asked_is_refused_at_once_and_never_leaves_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = Peers()

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(TransferError, match="cannot open its peer: can't start new thread"):
            peers.write(0)
    assert peers.openings.close(WAIT_S), "nothing is there to wait for"
    peers.answers["a"].set()
    peers.write(1)
    peers.wait_settled(1)
    assert peers.delivered == [1]
    peers.openings.close(WAIT_S)


def test_writes_wait_until_the_peer_answers_and_leave_in_order() -> None:
    peers = Peers()
    for number in range(5):
        peers.write(number)
    assert not peers.delivered
    assert not peers.openings.is_open("a")
    peers.answers["a"].set()
    peers.wait_settled(5)
    assert peers.delivered == [0, 1, 2, 3, 4]
    assert peers.num_probes == 1
    peers.openings.close(WAIT_S)


def test_an_answered_peer_is_open_and_is_not_probed_again() -> None:
    peers = Peers()
    peers.answers["a"].set()
    peers.write(1)
    peers.wait_settled(1)
    peers.openings.close(WAIT_S)
    assert peers.openings.is_open("a")
    peers.write(2)
    peers.wait_settled(1)
    assert peers.delivered == [1, 2]
    assert peers.num_probes == 1


def test_a_peer_whose_probe_fails_gets_nothing_and_is_probed_again_by_the_next_write() -> None:
    """As on a device that tells the probing thread of what another one has not done."""
    peers = Peers()
    peers.failure = RuntimeError("an illegal memory access was encountered")
    peers.write(1)
    peers.wait_settled(1)
    assert peers.refused == [1]
    peers.openings.close(WAIT_S)
    peers.failure = None
    peers.answers["a"].set()
    peers.write(2)
    peers.wait_settled(1)
    assert peers.delivered == [2]
    peers.openings.close(WAIT_S)


def test_a_peer_that_does_not_answer_gets_nothing_and_is_probed_again_by_the_next_write() -> None:
    peers = Peers()
    peers.is_alive = False
    peers.answers["a"].set()
    peers.write(1)
    peers.wait_settled(1)
    peers.openings.close(WAIT_S)
    assert peers.refused == [1]
    peers.is_alive = True
    peers.write(2)
    peers.wait_settled(1)
    assert peers.delivered == [2]


def test_a_silent_peer_does_not_delay_another() -> None:
    peers = Peers()
    peers.write(1, "a")
    peers.answers["b"].set()
    peers.write(2, "b")
    peers.wait_settled(1)
    assert peers.delivered == [2]
    peers.answers["a"].set()
    peers.openings.close(WAIT_S)


def test_what_waits_when_the_transport_closes_is_refused_and_never_delivered() -> None:
    peers = Peers()
    peers.write(1)
    peers.openings.close(0.0)
    peers.answers["a"].set()
    peers.wait_settled(1)
    peers.openings.close(WAIT_S)
    assert peers.refused == [1]
    assert not peers.delivered
