"""The arithmetic of the time-to-first-token benchmark, on traces made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.ttft_figures import (
    COLUMNS,
    Round,
    Row,
    Sample,
    Spread,
    Transfer,
    Way,
    build_row,
    format_table,
    read_transfer,
    spread,
)
from benchmarks.ttft_plot import draw

from pdcluster_cli.local.traces import LayerTrace, PushTrace, RequestTrace

REQUEST = RequestTrace(
    transfer_id="t",
    received_at=10.0,
    status=200,
    prefill_sent_at=10.02,
    prefill_replied_at=10.32,
    first_byte_at=10.55,
)


def push(*acked_at: float, outcome: str = "done") -> PushTrace:
    """A push of one layer of 1,000 bytes for each acknowledgement; its forward pass ends at 10.3."""
    layers = tuple(LayerTrace(1, i, at - 0.1, at - 0.05, at, 1000) for i, at in enumerate(acked_at))
    return PushTrace("t", outcome, 64, len(layers), 1000 * len(layers), 8, 2, 10.05, 10.3, layers)


def transfer_of(*acked_at: float) -> Transfer:
    transfer = read_transfer(REQUEST, [push(*acked_at)])
    assert transfer is not None
    return transfer


def round_of(single: float, serial: float, layerwise: float) -> Round:
    """These times to first token. The serial push hides nothing, the layerwise one three of four layers."""
    return Round(
        bandwidth=20_000.0,
        samples={
            Way.SINGLE: Sample(Way.SINGLE, single, None),
            Way.SERIAL: Sample(Way.SERIAL, serial, transfer_of(10.4, 10.45, 10.5, 10.55)),
            Way.LAYERWISE: Sample(Way.LAYERWISE, layerwise, transfer_of(10.1, 10.2, 10.3, 10.4)),
        },
    )


ROWS = [
    build_row(link, tokens, [round_of(0.3, 0.6, 0.45), round_of(0.2, 0.5, 0.4), round_of(0.4, 0.8, 0.48)])
    for link in ("loopback", "1 Gbit/s")
    for tokens in (64, 128)
]


def test_the_last_byte_counts_from_the_routers_receipt() -> None:
    assert transfer_of(10.1, 10.5, 10.2).last_byte_s == pytest.approx(0.5)


def test_bytes_are_hidden_that_were_acknowledged_before_the_forward_pass_ended() -> None:
    assert transfer_of(10.1, 10.2, 10.3, 10.4).report.hidden_share == 0.75


@pytest.mark.parametrize(
    ("request_trace", "pushes"),
    [
        (REQUEST, []),
        (REQUEST, [push(10.2, outcome="failed")]),
        (RequestTrace(transfer_id="t", received_at=10.0), [push(10.2)]),
    ],
)
def test_there_is_no_transfer_without_a_whole_trace(request_trace: RequestTrace, pushes: list[PushTrace]) -> None:
    assert read_transfer(request_trace, pushes) is None


def test_hand_over_is_ttft_less_prefills_response_time() -> None:
    assert Sample(Way.SERIAL, 0.5, transfer_of(10.2)).hand_over_s == pytest.approx(0.2)


def test_a_spread_is_median_and_range() -> None:
    assert spread([3, 1, 2]) == Spread(2, 1, 3)


def test_a_row_compares_within_a_round_and_takes_the_median_over_rounds() -> None:
    row = ROWS[0]
    assert row.kv_bytes == 4000
    assert row.prefill == Spread(0.3, 0.2, 0.4)
    assert row.transfer == Spread(0.2, 0.2, 0.2)
    assert row.serial.ttft == Spread(0.6, 0.5, 0.8)
    assert row.serial.last_byte.median == pytest.approx(0.55)
    assert row.layerwise.hand_over.median == pytest.approx(0.15)
    assert row.layerwise.hidden_share.median == 0.75
    assert (row.gain.median, row.gain.low, row.gain.high) == pytest.approx((0.75, 0.6, 0.8))


def test_the_table_has_a_line_for_each_row_and_a_cell_for_each_column() -> None:
    header, rule, *lines = format_table(ROWS).splitlines()
    assert len(lines) == len(ROWS)
    assert {line.count("|") for line in (header, rule, *lines)} == {len(COLUMNS) + 1}
    assert "| 300 (200..400) |" in lines[0]
    assert lines[0].endswith("| 75% (75%..75%) | 0.75 (0.60..0.80) |")


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    draw(ROWS, tmp_path / "ttft.png")
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")


def test_one_link_is_enough_for_a_plot(tmp_path: Path) -> None:
    rows: list[Row] = ROWS[:2]
    draw(rows, tmp_path / "ttft.png")
    assert (tmp_path / "ttft.png").exists()
