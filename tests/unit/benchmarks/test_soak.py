"""What the soak calls growth."""

from __future__ import annotations

import pytest
from benchmarks.soak import Sample, growth_of


def soak(memory_kib_each: float = 0, threads_each: float = 0, descriptors_each: float = 0) -> list[Sample]:
    """40 samples of 500 requests; growth in each sample."""
    return [
        Sample(500 * n, int(100_000 + memory_kib_each * n), int(12 + threads_each * n), int(40 + descriptors_each * n))
        for n in range(1, 41)
    ]


def test_a_soak_without_growth_is_flat() -> None:
    assert growth_of(soak()).is_flat


def test_memory_that_wavers_is_flat() -> None:
    wavering = [Sample(500 * n, 100_000 + 3000 * (n % 3), 12, 40) for n in range(1, 41)]
    assert growth_of(wavering).is_flat


def test_what_grows_in_the_first_quarter_only_is_flat() -> None:
    warming = [Sample(500 * n, 100_000 + min(n, 10) * 5000, min(n, 10), 40) for n in range(1, 41)]
    assert growth_of(warming).is_flat


@pytest.mark.parametrize("grown", [soak(memory_kib_each=50), soak(threads_each=0.1), soak(descriptors_each=0.1)])
def test_growth_is_seen(grown: list[Sample]) -> None:
    assert not growth_of(grown).is_flat


@pytest.mark.parametrize("leap_at", [15, 20, 25, 35])
def test_one_leap_is_growth_wherever_it_is(leap_at: int) -> None:
    leaping = [Sample(500 * n, 100_000 + 50_000 * (n >= leap_at), 12, 40) for n in range(1, 41)]
    assert not growth_of(leaping).is_flat


def test_memory_growth_is_told_for_a_thousand_requests() -> None:
    assert growth_of(soak(memory_kib_each=50)).memory_kib_per_1000 == pytest.approx(100)
