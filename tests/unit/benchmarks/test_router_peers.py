"""How routers are started beside each other, and what is made of their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.router_contenders import CONTENDERS, Contender, Flow, command
from benchmarks.router_gates import Figures, gates_of
from benchmarks.router_peers import rows_of, widened

ENGINES = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3", "http://127.0.0.1:4"]


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda one: f"{one.name} {one.flow.value}")
def test_each_router_is_told_of_all_engines_and_the_first_half_is_prefills(
    contender: Contender, tmp_path: Path
) -> None:
    """Only where a client wants its prompt back ours is one hop."""
    words = command(contender, ENGINES, (8000, 8001), tmp_path)
    told = " ".join(words) + ((tmp_path / "nginx.conf").read_text() if contender.program else "")
    assert all(url.removeprefix("http://") in told for url in ENGINES)
    if contender.flow is Flow.PREFILL_DECODE:
        assert [words[i + 1] for i, word in enumerate(words) if word == "--prefill"] == ENGINES[:2]
        assert [words[i + 1] for i, word in enumerate(words) if word == "--decode"] == ENGINES[2:]
    assert json.loads(contender.body).get("echo", False) is (contender.flow is Flow.ONE_HOP)
    assert json.loads(widened(contender.body, prompt="other"))["prompt"] == "other"


def test_a_row_has_requests_of_a_core_and_the_ratio_of_the_same_round() -> None:
    figures = [Figures(small, [2.0], [3.0], [4.0], [5.0], [6.0]) for small in ([100.0, 400.0], [50.0, 100.0])]
    names = (Contender("pdcluster", Flow.PREFILL_DECODE), Contender("peer", Flow.PREFILL_DECODE))
    rows = rows_of(dict(zip(names, figures, strict=True)))
    assert rows == [
        ("P/D", "pdcluster", "4,000", "2", "3.0", "4", "5", "6", "1.00 (1.00..1.00)"),
        ("P/D", "peer", "13,333", "2", "3.0", "4", "5", "6", "3.00 (2.00..4.00)"),
    ]


PEERS = {"fast": Figures([80.0], [9.0], [30.0], [400.0], [600.0], [700.0]), "slow": Figures(*[[999.0]] * 6)}


@pytest.mark.parametrize(
    ("own", "failing"),
    [
        (Figures([60.0], [9.0], [30.0], [80.0], [600.0], [700.0], [63.0]), set()),
        (Figures([62.0], [9.1], [30.0], [80.0], [600.0], [700.0], [64.0]), {"requests/s", "CPU of 100,000 tokens"}),
        (Figures([60.0], [9.0], [31.0], [81.0], [600.0], [700.0], [64.0]), {"CPU of an event", "memory", "256"}),
        (Figures([60.0], [9.0], [30.0], [80.0], [601.0], [701.0], []), {"added p50", "added p99"}),
    ],
)
def test_each_gate_is_held_against_the_best_peer_or_its_own_limit(own: Figures, failing: set[str]) -> None:
    found = {Contender(name, Flow.PREFILL_DECODE): figures for name, figures in PEERS.items()}
    gates = list(gates_of({Contender("pdcluster", Flow.PREFILL_DECODE): own} | found, 256))
    assert len(gates) == 6 + bool(own.many_us)
    open_ones = [gate for gate in gates if not gate.holds]
    assert len(open_ones) == len(failing)
    assert all(any(word in gate.name for gate in open_ones) for word in failing)
    assert not any("slow" in gate.wanted for gate in gates)
