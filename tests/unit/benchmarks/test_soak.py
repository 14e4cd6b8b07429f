"""What the soak calls growth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from benchmarks.soak import Sample, growth_of


def soak(kib: Callable[[int], int], threads_each: float = 0, descriptors_each: float = 0) -> list[Sample]:
    """40 samples of 500 requests. ``kib``: memory beyond 100,000 KiB in each; the others: growth in each."""
    return [
        Sample(500 * n, 100_000 + kib(n), int(12 + threads_each * n), int(40 + descriptors_each * n))
        for n in range(1, 41)
    ]


@pytest.mark.parametrize(
    ("samples", "is_flat"),
    [
        (soak(lambda _: 0), True),
        (soak(lambda n: 3000 * (n % 3)), True),
        (soak(lambda n: 5000 * min(n, 10)), True),
        (soak(lambda n: 50 * n), False),
        (soak(lambda _: 0, threads_each=0.1), False),
        (soak(lambda _: 0, descriptors_each=0.1), False),
        *((soak(lambda n, at=at: 50_000 * (n >= at)), False) for at in (15, 20, 25, 35)),  # type: ignore[misc]  # a lambda's default has no type
    ],
)
def test_memory_that_wavers_or_grows_in_the_first_quarter_only_is_flat_and_other_growth_is_seen(
    samples: list[Sample], is_flat: bool
) -> None:
    assert growth_of(samples).is_flat is is_flat


def test_memory_growth_is_told_for_a_thousand_requests() -> None:
    assert growth_of(soak(lambda n: 50 * n)).memory_kib_per_1000 == pytest.approx(100)
