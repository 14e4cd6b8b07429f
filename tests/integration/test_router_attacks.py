"""One rude client beside good ones: nobody's stream breaks, memory stays where it was, no engine is taken for dead."""

from __future__ import annotations

import pytest
from benchmarks.router_attacks import MB, measure

from patience import EDGE_S

PATIENT = ("--probe-timeout", str(EDGE_S))
"""Beside other work on the machine an engine of the test may answer its probe late; that is nobody's attack."""


@pytest.mark.parametrize(
    "attack", ["c2", "jb", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t6", "pipe", "meta", "idle"))]
)
def test_one_clients_attack_breaks_no_stream_of_others_and_takes_little_memory(attack: str) -> None:
    figures = measure(attack, num_streams=100, flags=PATIENT)
    assert figures.growth_bytes < 50 * MB
    assert (figures.num_broken, figures.num_unhealthy) == (0, 0)
    assert figures.num_whole >= 100
