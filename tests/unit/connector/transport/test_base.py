"""Which ranges count as registered."""

from __future__ import annotations

import pytest

from pdcluster_connector.transport.base import RegisteredMemory


@pytest.fixture
def memory() -> RegisteredMemory:
    spans = RegisteredMemory()
    for address in (5000, 1000, 3000):
        spans.add(address, 500)
    return spans


@pytest.mark.parametrize(
    ("address", "num_bytes", "is_registered"),
    [
        (1000, 500, True),
        (1499, 1, True),
        (3100, 10, True),
        (5000, 500, True),
        (999, 10, False),
        (1000, 501, False),
        (1500, 1, False),
        (2000, 10, False),
        (1400, 2000, False),
        (5500, 1, False),
        (1000, 0, False),
        (1000, -1, False),
    ],
)
def test_a_range_is_registered_when_one_span_holds_all_of_it(
    memory: RegisteredMemory, address: int, num_bytes: int, *, is_registered: bool
) -> None:
    assert memory.is_registered(address, num_bytes) is is_registered


def test_nothing_is_registered_at_first() -> None:
    assert not RegisteredMemory().is_registered(0, 1)
