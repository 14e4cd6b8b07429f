"""How long the API server is left alone."""

from __future__ import annotations

import pytest

from pdcluster_kube.backoff import Backoff

BACKOFF = Backoff(first_s=1.0, most_s=30.0)


@pytest.mark.parametrize(
    ("num_failures", "least", "most"), [(1, 1, 2), (2, 1, 4), (4, 1, 16), (5, 1, 30), (6, 1, 30), (10**6, 1, 30)]
)
def test_the_wait_grows_with_each_failure_within_its_bounds(num_failures: int, least: float, most: float) -> None:
    assert BACKOFF.pause_s(num_failures, 0.0) == least
    assert most * 0.99 < BACKOFF.pause_s(num_failures, 0.999) <= most


@pytest.mark.parametrize(("asked_s", "expected"), [(0.5, 1.5), (7.0, 7.0)])
def test_what_the_api_server_asks_for_is_heeded(asked_s: float, expected: float) -> None:
    assert BACKOFF.pause_s(1, 0.5, asked_s=asked_s) == expected
