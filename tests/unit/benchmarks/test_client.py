"""What is read of an engine's metrics page."""

from __future__ import annotations

from benchmarks.client import PrefillTimes, parse_prefill_times

PAGE = """\
vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 2.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 3.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 0.75
vllm:request_prefill_time_seconds_count{engine="1",model_name="m"} 1.0
vllm:request_prefill_time_seconds_sum{engine="1",model_name="m"} 0.25
vllm:request_decode_time_seconds_sum{engine="0",model_name="m"} 9.0
"""


def test_prefill_times_of_all_ranks_are_added() -> None:
    assert parse_prefill_times(PAGE) == PrefillTimes(4, 1.0)
