"""The arithmetic of the time-to-first-token benchmark, on traces made by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from benchmarks.figures import Spread
from benchmarks.ttft_figures import Answer, Burst, Round, Transfer, Way, build_row, format_limits, format_ways
from benchmarks.ttft_figures import read_transfer as read

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
    """A push of one layer of 1,000,000 bytes for each acknowledgement; its forward pass ends at 10.3."""
    layers = tuple(LayerTrace(1, i, at - 0.1, at - 0.05, at, 10**6) for i, at in enumerate(acked_at))
    return PushTrace(
        transfer_id=TransferId("t"),
        outcome=outcome,
        prompt_tokens=64,
        num_layers=len(layers),
        num_bytes=10**6 * len(layers),
        ranges=8,
        writes=2,
        forward_begin=10.05,
        forward_end=10.3,
        layers=layers,
    )


def transfer_of(*acked_at: float, later_s: float = 0.0) -> Transfer:
    moved = {name: getattr(REQUEST, name) + later_s for name in ("received_at", "prefill_sent_at", "first_byte_at")}
    request = msgspec.structs.replace(REQUEST, prefill_replied_at=10.32 + later_s, **moved)
    transfer = read(request, [push(*acked_at)])
    assert transfer is not None
    return transfer


def burst(ttft_s: float, *acked_at: float) -> Burst:
    return Burst((Answer(ttft_s, None),), (transfer_of(*acked_at),))


def round_of(single: float, serial: float, layerwise: float, bandwidth: float = 20e6) -> Round:
    """These times to first token. The serial push hides nothing, the layerwise one three of four layers."""
    return Round(
        bandwidth,
        {
            Way.SINGLE: Burst((Answer(single, single),)),
            Way.SERIAL: burst(serial, 10.4, 10.45, 10.5, 10.55),
            Way.LAYERWISE: burst(layerwise, 10.1, 10.3, 10.2, 10.4),
            Way.NIXL: Burst((Answer(0.9, 0.3),)),
        },
    )


ROUNDS = [round_of(0.3, 0.6, 0.45), round_of(0.2, 0.5, 0.4), round_of(0.4, 0.8, 0.48)]


def test_a_burst_counts_from_the_first_receipt_and_hands_over_what_ttft_has_beyond_prefill() -> None:
    both = Burst((Answer(1, None),) * 2, (transfer_of(10.5), transfer_of(10.7, later_s=0.1)))
    assert both.last_byte_s == pytest.approx(0.7)
    assert both.hand_over_s == pytest.approx(0.7)
    assert Burst((Answer(0.5, 0.3), Answer(0.7, 0.3))).hand_over_s == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("request_trace", "pushes"),
    [
        (REQUEST, []),
        (REQUEST, [push(10.2, outcome="failed")]),
        (RequestTrace(transfer_id=TransferId("t"), received_at=10.0), [push(10.2)]),
    ],
)
def test_there_is_no_transfer_without_a_whole_trace(request_trace: RequestTrace, pushes: list[PushTrace]) -> None:
    assert read(request_trace, pushes) is None


def test_the_limit_is_the_longer_of_prefill_alone_and_transfer_alone() -> None:
    assert (ROUNDS[0].limit_s, replace(ROUNDS[0], bandwidth=8e6).limit_s) == (0.3, 0.5)


def test_a_row_compares_within_a_round_takes_the_median_and_leaves_open_what_no_trace_tells() -> None:
    row = build_row("loopback", 64, ROUNDS)
    ways = [line.split(" | ")[3:] for line in format_ways([row]).splitlines()[2:]]
    assert ways == [
        ["single engine", "300 (200..400)", "", "", " |"],
        ["serial push", "600 (500..800)", "300 (200..500)", "550 (550..550)", "0% (0%..0%) |"],
        ["layerwise push", "450 (400..480)", "150 (100..180)", "400 (400..400)", "75% (75%..75%) |"],
        ["NixlConnector", "900 (900..900)", "600 (600..600)", "", " |"],
    ]
    (limits,) = format_limits([row]).splitlines()[2:]
    assert limits.split(" | ")[3:] == [
        *("3", "4", "300 (200..400)", "200 (200..200)", "1.33 (1.00..2.00)", "1.50 (1.20..2.00)"),
        *("0.50 (0.36..0.50)", "1.50 (1.20..2.00)", "0.75 (0.60..0.80)", "", "0.50 (0.44..0.53) |"),
    ]


def test_a_round_in_which_a_peer_failed_is_left_out_of_its_figures_only() -> None:
    whole, failed = ROUNDS[:2]
    failed = replace(failed, bursts={way: it for way, it in failed.bursts.items() if way is not Way.NIXL})
    row = build_row("loopback", 64, [whole, failed])
    assert row.ttft_to[Way.NIXL] == Spread(0.5, 0.5, 0.5)
    assert row.ttft_to[Way.SERIAL].median == pytest.approx(0.775)
