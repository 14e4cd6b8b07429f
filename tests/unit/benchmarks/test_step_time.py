"""Which steps of a stream count, and how step times and loads become rows."""

from __future__ import annotations

import pytest
from benchmarks import heavy_load, step_time
from benchmarks.client import BenchmarkError, Streamed
from benchmarks.step_time import Round, Steps, Window, step_s
from benchmarks.ttft_figures import Answer, Burst, Way

STREAM = Streamed(0.0, (*(0.01 * number for number in range(100)), 9.0))


def test_a_step_is_the_mean_time_between_tokens_that_came_within_the_window() -> None:
    assert step_s(STREAM, Window(0.2, 0.9)) == pytest.approx(0.01)
    with pytest.raises(BenchmarkError, match="only 3 tokens"):
        step_s(STREAM, Window(0.195, 0.225))


def test_step_times_are_compared_within_a_round() -> None:
    decode_steps = [(0.010, 0.010, 0.011), (0.020, 0.016, 0.020), (0.010, 0.012, 0.012)]
    prefill_steps = [(1.0, 1.0, 1.02), (1.0, 1.0, 1.04), (1.0, 1.25, 1.0)]
    rounds = [Round(Steps(*one), Steps(*other)) for one, other in zip(decode_steps, prefill_steps, strict=True)]
    decode, prefill = step_time.build_cells("loopback", 2048, rounds)
    assert decode == ("loopback", "2,048", "decode, receiving", "10.00 (10.00..20.00)", "12.00 (10.00..16.00)",
                      "12.00 (11.00..20.00)", "1.100 (1.000..1.200)", "1.100 (1.000..1.250)")  # fmt: skip
    assert prefill[-2:] == ("1.020 (1.000..1.040)", "1.020 (0.800..1.040)")


def test_load_is_shown_by_mean_and_slowest_beside_serial_and_a_single_engine() -> None:
    def burst(*seconds: float) -> Burst:
        return Burst(tuple(Answer(ttft_s, None) for ttft_s in seconds))

    runs = [
        {Way.SINGLE: burst(2, 2, 2), Way.SERIAL: burst(1, 2, 3), Way.LAYERWISE: burst(1, 1, 1)},
        {Way.SINGLE: burst(1, 1, 1), Way.SERIAL: burst(2, 2, 2), Way.LAYERWISE: burst(1, 2, 3)},
    ]
    mean, p99 = heavy_load.build_cells(("1 Gbit/s",), runs)
    assert mean[-2:] == ("0.75 (0.50..1.00)", "1.25 (0.50..2.00)")
    assert p99 == ("1 Gbit/s", "p99", "1,500 (1,000..2,000)", "2,500 (2,000..3,000)", "2,000 (1,000..3,000)",
                   "0.92 (0.33..1.50)", "1.75 (0.50..3.00)")  # fmt: skip


def test_engines_under_load_have_room_for_two_of_the_longest_prompts_and_the_context_fits_into_it() -> None:
    served = heavy_load.Plan(("1gbit",), (1024, 2048), 100, 8, 1).served
    assert 2 * 2048 < served.room_tokens < 3 * 2048
    words = served.args
    room_bytes = int(words[words.index("--kv-cache-memory-bytes") + 1])
    context = int(words[words.index("--max-model-len") + 1])
    assert 2048 < context <= room_bytes // served.kv_token_bytes - 128
