"""vLLM before 0.30 fails the very request whose KV does not come, and no other one."""

from __future__ import annotations

import pytest

from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.vllm.load_errors import FailedBlocks, PushedBlocks, can_fail_running, require_one_group
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import RequestId

A, B = RequestId("a"), RequestId("b")
FULL, WINDOW, STATE = KvGroup(16), KvGroup(16, is_windowed=True), KvGroup(1, is_state=True)


@pytest.mark.parametrize(
    ("table", "first_token", "named"),
    [
        pytest.param([11, 12, 13, 14], 32, {13, 14}, id="those of the prefix cache are held by requests that run"),
        pytest.param([0, 0, 13], 0, {13}, id="the null block before a window is everybody's"),
    ],
)
def test_only_blocks_that_a_push_fills_are_named(table: list[int], first_token: int, named: set[int]) -> None:
    pushed, failed = PushedBlocks(16), FailedBlocks()
    pushed.reserve(A, table, first_token)
    failed.begin_step(pushed.take_new())
    failed.ended({A}, {A})
    assert failed.take() == named


def test_a_request_whose_kv_came_is_named_by_nobody() -> None:
    pushed, failed = PushedBlocks(16), FailedBlocks()
    pushed.reserve(A, [1], 0)
    pushed.reserve(B, [2], 0)
    failed.begin_step(pushed.take_new())
    failed.ended({A, B}, {B})
    assert failed.take() == {2}
    assert failed.take() == set()


def test_the_scheduler_half_knows_the_request_by_its_blocks_until_all_ranks_have_ended() -> None:
    pushed = PushedBlocks(16)
    pushed.reserve(A, [1, 2], 0)
    pushed.reserve(B, [3], 0)
    assert pushed.failed({2}) == {A}
    assert pushed.failed({2}) == {A}
    pushed.forget([A])
    assert pushed.failed({2}) == set()
    assert pushed.failed({3}) == {B}


def test_workers_hear_of_a_reservation_once() -> None:
    pushed = PushedBlocks(16)
    pushed.reserve(A, [1], 0)
    assert pushed.take_new() == {A: (1,)}
    assert pushed.take_new() == {}


@pytest.mark.parametrize(
    ("groups", "recomputes", "words"),
    [
        ((FULL, WINDOW), False, "the model has 2 KV groups"),
        ((STATE,), False, "the model has recurrent state"),
        ((WINDOW,), True, "kv_load_failure_policy is recompute"),
    ],
)
def test_what_cannot_be_told_by_blocks_is_refused(groups: tuple[KvGroup, ...], recomputes: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        require_one_group("0.23.0", groups, recomputes=recomputes)
    assert "vLLM 0.23.0" in str(refused.value)
    assert "use vLLM 0.30 or newer" in str(refused.value)


@pytest.mark.parametrize(("groups", "recomputes"), [((FULL,), True), ((FULL,), False), ((WINDOW,), False)])
def test_one_group_is_told_by_its_blocks(groups: tuple[KvGroup, ...], recomputes: bool) -> None:
    require_one_group("0.23.0", groups, recomputes=recomputes)


@pytest.mark.parametrize(
    ("groups", "recomputes", "can"),
    [
        ((FULL,), False, True),
        ((WINDOW,), False, True),
        ((FULL,), True, False),
        ((FULL, WINDOW), False, False),
        ((FULL, FULL), False, False),
        ((STATE,), False, False),
    ],
)
def test_a_request_that_runs_is_named_only_where_vllm_ends_it_and_not_its_engine(
    groups: tuple[KvGroup, ...], recomputes: bool, can: bool
) -> None:
    """With several groups vLLM 0.30 and newer raises in its engine core; older versions look in the first group."""
    assert can_fail_running(groups, recomputes=recomputes) is can
