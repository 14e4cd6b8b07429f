"""What an engine's metrics say of its work, and when it has had none for long enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdcluster_cli.pod.idleness import IdleWatch, Work, parse_work

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a {strange} name"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 100.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 7.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0
vllm:request_success_created{engine="0",finished_reason="abort",model_name="m"} 1.8e+09
pdcluster:failures_total{kind="push_failed"} 3.0
"""
NONE = Work(0, 0, 0.0, 8)


def test_all_engines_of_one_server_are_added_up() -> None:
    assert parse_work(METRICS) == Work(num_running=3, num_waiting=4, kv_share=0.25, num_ended=8)


def test_before_the_first_request_none_has_ended() -> None:
    lines = [line for line in METRICS.splitlines() if "request_success" not in line]
    assert parse_work("\n".join(lines)) == Work(3, 4, 0.25, 0)


@pytest.mark.parametrize("gauge", ["num_requests_running", "num_requests_waiting{", "kv_cache_usage_perc"])
def test_without_one_of_the_gauges_nothing_is_known(gauge: str) -> None:
    assert parse_work("\n".join(line for line in METRICS.splitlines() if gauge not in line)) is None
    assert parse_work("") is None


def test_a_timestamp_behind_the_value_is_none_of_it() -> None:
    lines = [f"{line} 1395066363000" if line.startswith("vllm:") else line for line in METRICS.splitlines()]
    assert parse_work("\n".join(lines)) == parse_work(METRICS)


@pytest.mark.parametrize("label", ['a } "quoted\\" 7', "vllm:num_requests_running 9", "\\\\"])
def test_a_label_may_hold_any_text(label: str) -> None:
    escaped = label.replace('"quoted', '\\"quoted')
    assert parse_work(METRICS.replace('model_name="m"', f'model_name="{escaped}", x="y",')) == parse_work(METRICS)


@pytest.mark.parametrize("value", [" NaN", " +Inf", " -1.0", "", " ", " many", " 0x2", '{engine="0" 2.0', '{a="b'])
def test_a_line_without_a_number_says_that_nothing_is_known(value: str) -> None:
    assert parse_work(f"{METRICS}vllm:num_requests_running{value}\n") is None


@pytest.mark.parametrize("change", [{"num_running": 1}, {"num_waiting": 1}, {"kv_share": 0.0001}])
def test_work_of_any_kind_is_work(change: dict[str, int]) -> None:
    assert NONE.is_none
    assert not replace(NONE, **change).is_none


def heard(*seen: tuple[float, Work | None]) -> list[bool]:
    watch = IdleWatch(3.0)
    return [watch.hear(work, now=now) for now, work in seen]


def test_idle_for_long_enough_without_a_break() -> None:
    assert heard((10.0, NONE), (12.9, NONE), (13.0, NONE)) == [False, False, True]


@pytest.mark.parametrize("between", [replace(NONE, num_running=1), replace(NONE, kv_share=0.1), None])
def test_work_and_not_knowing_begin_the_wait_anew(between: Work | None) -> None:
    assert heard((10.0, NONE), (12.0, between), (13.0, NONE), (15.9, NONE), (16.0, NONE)) == [False] * 4 + [True]


def test_a_request_between_two_looks_begins_the_wait_anew() -> None:
    more = replace(NONE, num_ended=9)
    assert heard((10.0, NONE), (12.9, more), (13.1, more), (15.9, more)) == [False, False, False, True]
