"""The arithmetic of the time-to-first-token benchmark, on traces made by hand."""

from __future__ import annotations

import pytest
from benchmarks.figures import Spread
from benchmarks.ttft_figures import (
    Answer,
    Burst,
    Round,
    Transfer,
    Way,
    build_row,
    read_transfer,
)

from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.trace import LayerTrace, PushTrace, RequestTrace

REQUEST = RequestTrace(
    transfer_id=TransferId("t"),
    received_at=10.0,
    status=200,
    prefill_sent_at=10.02,
    prefill_replied_at=10.32,
    first_byte_at=10.55,
)


def push(*acked_at: float, outcome: str = "done") -> PushTrace:
    """A push of one layer of 1,000 bytes for each acknowledgement; its forward pass ends at 10.3."""
    layers = tuple(LayerTrace(1, i, at - 0.1, at - 0.05, at, 1000) for i, at in enumerate(acked_at))
    return PushTrace(
        transfer_id=TransferId("t"),
        outcome=outcome,
        prompt_tokens=64,
        num_layers=len(layers),
        num_bytes=1000 * len(layers),
        ranges=8,
        writes=2,
        forward_begin=10.05,
        forward_end=10.3,
        layers=layers,
    )


def transfer_of(*acked_at: float, received_at: float = 10.0) -> Transfer:
    request = RequestTrace(
        transfer_id=TransferId("t"),
        received_at=received_at,
        status=200,
        prefill_sent_at=received_at + 0.02,
        prefill_replied_at=received_at + 0.32,
        first_byte_at=received_at + 0.55,
    )
    transfer = read_transfer(request, [push(*acked_at)])
    assert transfer is not None
    return transfer


def burst(ttft_s: float, *acked_at: float) -> Burst:
    return Burst((Answer(ttft_s, None),), (transfer_of(*acked_at),))


def round_of(single: float, serial: float, layerwise: float, bandwidth: float = 20_000.0) -> Round:
    """These times to first token. The serial push hides nothing, the layerwise one three of four layers."""
    return Round(
        bandwidth,
        {
            Way.SINGLE: Burst((Answer(single, single),)),
            Way.SERIAL: burst(serial, 10.4, 10.45, 10.5, 10.55),
            Way.LAYERWISE: burst(layerwise, 10.1, 10.2, 10.3, 10.4),
            Way.NIXL: Burst((Answer(0.9, 0.3),)),
        },
    )


ROWS = [
    build_row(link, tokens, [round_of(0.3, 0.6, 0.45), round_of(0.2, 0.5, 0.4), round_of(0.4, 0.8, 0.48)])
    for link in ("loopback", "1 Gbit/s")
    for tokens in (64, 128)
]


def test_the_last_byte_counts_from_the_routers_receipt() -> None:
    assert transfer_of(10.1, 10.5, 10.2).last_byte_s == pytest.approx(0.5)


def test_the_last_byte_of_a_burst_counts_from_the_first_receipt() -> None:
    both = Burst((Answer(1, None),) * 2, (transfer_of(10.5), transfer_of(10.7, received_at=10.1)))
    assert both.last_byte_s == pytest.approx(0.7)


def test_bytes_are_hidden_that_were_acknowledged_before_the_forward_pass_ended() -> None:
    assert transfer_of(10.1, 10.2, 10.3, 10.4).report.hidden_share == 0.75


@pytest.mark.parametrize(
    ("request_trace", "pushes"),
    [
        (REQUEST, []),
        (REQUEST, [push(10.2, outcome="failed")]),
        (RequestTrace(transfer_id=TransferId("t"), received_at=10.0), [push(10.2)]),
    ],
)
def test_there_is_no_transfer_without_a_whole_trace(request_trace: RequestTrace, pushes: list[PushTrace]) -> None:
    assert read_transfer(request_trace, pushes) is None


def test_hand_over_is_ttft_less_prefills_response_time_as_the_trace_or_the_client_saw_it() -> None:
    assert burst(0.5, 10.2).hand_over_s == pytest.approx(0.2)
    assert Burst((Answer(0.5, 0.3), Answer(0.7, 0.3))).hand_over_s == pytest.approx(0.3)


def test_the_limit_is_the_longer_of_prefill_alone_and_transfer_alone() -> None:
    assert round_of(0.3, 1, 1, bandwidth=20_000).limit_s == 0.3
    assert round_of(0.3, 1, 1, bandwidth=8_000).limit_s == 0.5


def test_a_row_compares_within_a_round_and_takes_the_median_over_rounds() -> None:
    row = ROWS[0]
    assert row.kv_bytes == 4000
    assert row.prefill == Spread(0.3, 0.2, 0.4)
    assert row.transfer == Spread(0.2, 0.2, 0.2)
    assert row.ways[Way.SERIAL].ttft == Spread(0.6, 0.5, 0.8)
    last_byte, hidden = row.ways[Way.SERIAL].last_byte, row.ways[Way.LAYERWISE].hidden_share
    assert last_byte is not None
    assert last_byte.median == pytest.approx(0.55)
    assert hidden is not None
    assert hidden.median == 0.75
    gain = row.ttft_to[Way.SERIAL]
    assert (gain.median, gain.low, gain.high) == pytest.approx((0.75, 0.6, 0.8))
    assert row.ttft_to_limit.median == pytest.approx(1.5)
    assert row.last_byte_to_limit.median == pytest.approx(0.4 / 0.3)
    assert row.exposed.median == pytest.approx(0.15 / 0.3)


def test_a_round_in_which_a_peer_failed_is_left_out_of_its_figures_only() -> None:
    whole, failed = round_of(0.3, 0.6, 0.45), round_of(0.2, 0.5, 0.4)
    failed = Round(failed.bandwidth, {way: it for way, it in failed.bursts.items() if way is not Way.NIXL})
    row = build_row("loopback", 64, [whole, failed])
    assert row.ttft_to[Way.NIXL] == Spread(0.5, 0.5, 0.5)
    assert row.ttft_to[Way.SERIAL].median == pytest.approx(0.775)


def test_what_no_trace_tells_is_left_open() -> None:
    assert ROWS[0].ways[Way.NIXL].last_byte is None
    assert ROWS[0].ways[Way.SINGLE].hand_over is None
