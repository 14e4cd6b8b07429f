"""What older vLLM tells of changes adds up to the tables that newer ones hand out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_connector.vllm.block_tables import BlockTables, resolved
from pdcluster_protocol.ids import RequestId

A, B = RequestId("a"), RequestId("b")


def output(**changes: Any) -> SimpleNamespace:
    """As vLLM 0.23's ``SchedulerOutput``; ``changes`` are new, cached, resumed, preempted and finished requests."""
    cached = changes.get("cached", {})
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=a, block_ids=b) for a, b in changes.get("new", {}).items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), new_block_ids=list(cached.values()), resumed_req_ids=changes.get("resumed", set())
        ),
        preempted_req_ids=changes.get("preempted"),
        finished_req_ids=changes.get("finished", set()),
    )


def test_new_blocks_come_behind_those_that_a_request_has() -> None:
    tables = BlockTables()
    tables.follow(output(new={A: ([1, 2],), B: ([7],)}))
    table_of = tables.follow(output(cached={A: ([3],), B: None}))
    assert (table_of(A), table_of(B)) == (([1, 2, 3],), ([7],))


def test_vllms_own_lists_are_copied() -> None:
    """It goes on using them."""
    theirs = [1]
    tables = BlockTables()
    table_of = tables.follow(output(new={A: (theirs,)}))
    theirs.append(2)
    assert table_of(A) == ([1],)


def test_newer_versions_say_whole_tables() -> None:
    state = SimpleNamespace(resolve_block_ids={A: ([4],)}.__getitem__)
    assert resolved(SimpleNamespace(kv_connector_block_state=state))(A) == ([4],)


@given(st.lists(st.sampled_from(["run", "preempt", "finish"]), max_size=30), st.data())
def test_whatever_happens_tables_are_the_schedulers(steps: list[str], data: st.DataObject) -> None:
    """One request against a scheduler of a few lines, with two KV groups."""
    tables, next_block, is_known = BlockTables(), 1, False
    held: tuple[list[int], ...] | None = None
    told: dict[str, Any]
    for step in steps:
        if step == "run":
            blocks = tuple(list(range(next_block, next_block + data.draw(st.integers(0, 3)))) for _ in range(2))
            next_block += 3
            if held is None:
                told = {"cached": {A: blocks}, "resumed": {A}} if is_known else {"new": {A: blocks}}
                held, is_known = blocks, True
            else:
                told = {"cached": {A: blocks if any(blocks) else None}}
                held = tuple(old + more for old, more in zip(held, blocks, strict=True))
            assert tables.follow(output(**told))(A) == held
        elif held is not None:
            held, is_known = None, step == "preempt"
            tables.follow(output(**{"preempted" if is_known else "finished": {A}}))
            assert tables._tables == {}
