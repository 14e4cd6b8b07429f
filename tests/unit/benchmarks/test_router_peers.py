"""How routers are started beside each other, and what is made of their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.router_contenders import CONTENDERS, Contender, Flow, command
from benchmarks.router_peers import COLUMNS, Figures, rows_of, widened

ENGINES = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3", "http://127.0.0.1:4"]
OURS = Contender("pdcluster", Flow.PREFILL_DECODE, module="pdcluster_router")
PEER = Contender("peer", Flow.PREFILL_DECODE, module="peer")


def figures(*small_us: float) -> Figures:
    some = [1.0] * len(small_us)
    return Figures(list(small_us), some, some, some, some, some)


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda one: f"{one.name} {one.flow.value}")
def test_each_router_is_told_of_all_engines_and_its_port(contender: Contender, tmp_path: Path) -> None:
    words = " ".join(command(contender, ENGINES, (8000, 8001), tmp_path))
    told = words + (tmp_path / "nginx.conf").read_text() if contender.program else words
    assert all(url.removeprefix("http://") in told for url in ENGINES)
    assert "8000" in told


@pytest.mark.parametrize("contender", [c for c in CONTENDERS if c.flow is Flow.PREFILL_DECODE], ids=lambda c: c.name)
def test_the_first_half_of_the_engines_is_prefills(contender: Contender, tmp_path: Path) -> None:
    words = command(contender, ENGINES, (8000, 8001), tmp_path)
    assert [words[i + 1] for i, word in enumerate(words) if word == "--prefill"] == ENGINES[:2]
    assert [words[i + 1] for i, word in enumerate(words) if word == "--decode"] == ENGINES[2:]


def test_only_where_a_client_wants_its_prompt_back_ours_is_one_hop() -> None:
    assert json.loads(Contender("a", Flow.ONE_HOP, module="a").body)["echo"] is True
    assert "echo" not in json.loads(OURS.body)


def test_a_row_has_requests_of_a_core_and_the_ratio_of_the_same_round() -> None:
    rows = rows_of({OURS: figures(100, 400), PEER: figures(50, 100)})
    assert [len(row) for row in rows] == [len(COLUMNS)] * 2
    assert [(row[1], row[2], row[-1]) for row in rows] == [
        ("pdcluster", "4,000", "1.00 (1.00..1.00)"),
        ("peer", "13,333", "3.00 (2.00..4.00)"),
    ]


def test_a_request_gets_other_fields() -> None:
    assert json.loads(widened(b'{"a":1,"b":2}', b=3, stream=True)) == {"a": 1, "b": 3, "stream": True}
