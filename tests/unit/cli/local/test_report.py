"""The transfer report's arithmetic and wording, on traces made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdcluster_cli.local.report import build_report, format_report, hidden_share, pushes_in, read_traces, requests_in
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.trace import LayerTrace, PushTrace, RequestTrace

REQUEST = RequestTrace(
    transfer_id=TransferId("t"),
    received_at=10.0,
    status=200,
    prefill_sent_at=10.05,
    prefill_replied_at=10.25,
    first_byte_at=10.3,
    cached_tokens=16,
)


def push(
    *acked_at: float, outcome: str = "done", forward_end: float | None = 10.2, num_bytes: int = 1 << 20
) -> PushTrace:
    layers = tuple(LayerTrace(1, i, at - 0.02, at - 0.01, at, num_bytes) for i, at in enumerate(acked_at))
    return PushTrace(
        transfer_id=TransferId("t"),
        outcome=outcome,
        prompt_tokens=100,
        num_layers=len(layers),
        num_bytes=num_bytes * len(layers),
        ranges=12,
        writes=2,
        forward_begin=10.06,
        forward_end=forward_end,
        layers=layers,
    )


def test_times_are_differences_of_the_routers_moments() -> None:
    report = build_report(REQUEST, [push(10.1)])
    assert report is not None
    assert report.ttft_s == pytest.approx(0.3)
    assert report.prefill_s == pytest.approx(0.2)
    assert report.hand_over_s == pytest.approx(0.1)


def test_ranks_add_up_and_failed_attempts_do_not_count() -> None:
    report = build_report(REQUEST, [push(10.1, 10.15), push(10.1, 10.3), push(10.1, outcome="failed")])
    assert report is not None
    assert (report.prompt_tokens, report.cached_tokens, report.num_layers) == (100, 16, 2)
    assert (report.num_bytes, report.ranges, report.writes) == (4 << 20, 24, 4)
    assert report.hidden_share == 0.75


@pytest.mark.parametrize("pushes", [[], [push(10.1, outcome="failed")]])
def test_without_a_push_that_ended_well_there_is_no_report(pushes: list[PushTrace]) -> None:
    assert build_report(REQUEST, pushes) is None


def test_a_byte_is_hidden_up_to_the_very_end_of_the_forward_pass() -> None:
    assert hidden_share([push(10.2, 10.2001)]) == 0.5


def test_bytes_count_and_not_layers() -> None:
    assert hidden_share([push(10.1, num_bytes=30), push(10.3, num_bytes=10)]) == 0.75


def test_nothing_is_hidden_behind_a_forward_pass_without_an_end() -> None:
    assert hidden_share([push(10.1, forward_end=None)]) == 0.0


def test_of_no_bytes_no_share_is_known() -> None:
    assert hidden_share([]) is None
    assert hidden_share([push()]) is None


def test_the_report_is_a_table_that_a_person_reads() -> None:
    report = build_report(REQUEST, [push(10.1, 10.15, 10.18, 10.3)])
    assert report is not None
    assert format_report(report, "300 tokens compared").splitlines() == [
        "Transfer report",
        "  proven                 300 tokens compared",
        "  prompt                 100 tokens (16 cached on decode)",
        "  layers per rank        4",
        "  KV pushed              4.0 MiB",
        "  writes                 2 (coalesced from 12 block ranges)",
        "  time to first token    300.0 ms",
        "  prefill                200.0 ms",
        "  hand-over              100.0 ms (time to first token less prefill)",
        "  hidden behind compute  75% of the bytes were acknowledged before the forward pass ended",
    ]


def test_a_moment_that_is_missing_is_unknown_and_not_zero() -> None:
    report = build_report(
        RequestTrace(transfer_id=TransferId("t"), received_at=10.0, first_byte_at=10.3), [push(10.1, num_bytes=512)]
    )
    assert report is not None
    assert (report.prefill_s, report.hand_over_s, report.cached_tokens) == (None, None, 0)
    text = format_report(report, "300 tokens compared")
    assert "prefill                unknown\n" in text
    assert "hand-over              unknown (" in text
    assert "0.5 KiB" in text


def test_traces_are_read_without_the_line_that_is_still_written(tmp_path: Path) -> None:
    router, engine = tmp_path / "router", tmp_path / "engine"
    first = {"event": "request", "transfer_id": "t", "received_at": 10.0, "a_later_field": [1]}
    second = {"event": "request", "transfer_id": "u", "received_at": 9.0}
    router.write_text("".join(json.dumps(line) + "\n" for line in (first, second)))
    received = {"event": "receive", "transfer_id": "t", "outcome": "done"}
    pushed = {
        "event": "push", "transfer_id": "t", "outcome": "done", "prompt_tokens": 100, "num_layers": 1, "num_bytes": 8,
        "ranges": 1, "writes": 1, "forward_begin": 1.0, "forward_end": None, "layers": [[1, 0, 1.0, 1.1, 1.2, 8]],
    }  # fmt: skip
    engine.write_text(json.dumps(received) + "\n" + json.dumps(pushed) + "\n" + json.dumps(pushed)[:40])
    traces = read_traces([router, engine, tmp_path / "missing"])
    assert [request.transfer_id for request in requests_in(traces)] == ["u", "t"]
    assert [layer.num_bytes for found in pushes_in(traces, "t") for layer in found.layers] == [8]
    assert pushes_in(traces, "u") == []
    assert len(traces) == 4
