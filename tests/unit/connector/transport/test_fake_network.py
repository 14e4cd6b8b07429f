"""The script of the fake: what tests can make a transport do beyond the contract of every transport."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest

from fakes.network import FakeNetwork, FakeTransport
from pdcluster_connector.transport.base import WriteId, WriteStatus


@dataclass(frozen=True, slots=True)
class Ends:
    """16 bytes on either side; the prefill's say 1, the decode's 0."""

    network: FakeNetwork
    prefill: FakeTransport
    decode: FakeTransport
    source: ctypes.Array[ctypes.c_char]
    target: ctypes.Array[ctypes.c_char]

    def write(self) -> WriteId:
        return self.prefill.submit_writes(
            self.decode.session, [(ctypes.addressof(self.source), ctypes.addressof(self.target), 16)]
        )

    @property
    def has_landed(self) -> bool:
        return self.target.raw == self.source.raw


@pytest.fixture
def ends() -> Ends:
    network = FakeNetwork()
    pair = Ends(
        network,
        network.join(),
        network.join(),
        ctypes.create_string_buffer(b"1" * 16, 16),
        ctypes.create_string_buffer(16),
    )
    pair.prefill.register(ctypes.addressof(pair.source), 16)
    pair.decode.register(ctypes.addressof(pair.target), 16)
    return pair


def test_writes_are_released_oldest_first_and_the_rest_stays_held(ends: Ends) -> None:
    ends.network.hold()
    first, second = ends.write(), ends.write()
    ends.network.release(1)
    third = ends.write()
    assert [ends.prefill.write_status(write) for write in (first, second, third)] == [
        WriteStatus.DONE,
        WriteStatus.PENDING,
        WriteStatus.PENDING,
    ]


def test_a_write_fails_and_never_lands(ends: Ends) -> None:
    ends.network.fail_next()
    assert ends.prefill.write_status(ends.write()) is WriteStatus.FAILED
    ends.network.land_late()
    assert not ends.has_landed


def test_a_failed_write_lands_late(ends: Ends) -> None:
    ends.network.fail_next(lands_late=True)
    assert ends.prefill.write_status(ends.write()) is WriteStatus.FAILED
    assert not ends.has_landed
    ends.network.land_late()
    assert ends.has_landed
