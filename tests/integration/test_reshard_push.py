"""Token-major KV from a prefill TP group to decode engines of other TP: right bytes, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from integration.reshard_cache import BLOCK
from integration.reshard_pushes import QUICK, DecodeEngine, Job, PrefillGroup, prefill_group


def job(
    name: str, decode: DecodeEngine, num_tokens: int, first_block: int, *, cached: int = 0, reverse: bool = True
) -> Job:
    """Prefill's blocks from ``first_block`` on; decode's in the other direction."""
    ours = range(first_block, first_block - (-num_tokens // BLOCK))
    theirs = range(1 + first_block, 1 + first_block - (-num_tokens // decode.block_tokens))
    return Job(name, decode, num_tokens, tuple(ours), tuple(theirs)[:: -1 if reverse else 1], cached)


def push_whole(group: PrefillGroup, *jobs: Job) -> None:
    for one in jobs:
        group.add(one)
    group.forward({one.name: one.num_tokens for one in jobs})


def require_received(group: PrefillGroup, *jobs: Job) -> None:
    """Every rank of decode gets each of these, every byte is right, and none of its cached tokens is touched."""
    names = [one.name for one in jobs]
    assert group.step_until(lambda: all(group.outcomes(*names)))
    assert group.outcomes(*names) == [{True}] * len(jobs), [one.decode.losses for one in jobs]
    for one in jobs:
        one.require_exact()
        one.require_untouched()


def require_let_go(group: PrefillGroup, *names: str) -> None:
    """When vLLM has ended them, every rank of prefill frees their blocks, and has all of its staging memory back."""
    group.finish(*names)
    assert group.step_until(lambda: group.are_released(*names))
    group.require_no_staging_taken()


def test_engines_of_any_tp_get_their_heads_in_chunks_and_together(tmp_path: Path) -> None:
    """Three decode engines at once: fewer ranks, more ranks, and the same number, which needs no resharding."""
    with prefill_group(2, [(1, BLOCK, 1), (4, BLOCK, 1), (2, BLOCK, 1)], tmp_path) as group:
        one, four, equal = group.decodes
        jobs = [
            group.add(job("long", one, 700, 1)),
            group.add(job("wide", four, 300, 30)),
            group.add(job("equal", equal, 650, 50)),
            group.add(job("cached", one, 600, 80, cached=256)),
            group.add(job("short", four, 5, 110)),
        ]
        group.forward({"long": 290, "wide": 40, "equal": 333, "cached": 300})
        group.forward({"long": 580, "wide": 300, "equal": 650, "short": 5})
        group.forward({"long": 700, "cached": 600})
        require_received(group, *jobs)
        assert not any(group.released.values())
        require_let_go(group, *(one.name for one in jobs))


def test_four_ranks_feed_one_and_two_with_other_blocks_and_pages(tmp_path: Path) -> None:
    """One more has two stages: each part is handed to the lanes of both, and one of them has the layer."""
    with prefill_group(4, [(1, 16, 1), (2, BLOCK, 2), (1, BLOCK, 1, 2)], tmp_path) as group:
        one, two, staged = group.decodes
        jobs = [
            group.add(job("stages", staged, 500, 90)),
            group.add(job("small blocks", one, 1100, 1, reverse=False)),
            group.add(job("large blocks", two, 777, 40, cached=128)),
        ]
        group.forward({"small blocks": 500, "large blocks": 400, "stages": 200})
        group.forward({"small blocks": 1100, "large blocks": 777, "stages": 500})
        require_received(group, *jobs)
        require_let_go(group, *(one.name for one in jobs))


def test_a_push_that_one_decode_rank_revokes_disturbs_nobody_else(tmp_path: Path) -> None:
    """Rank 0 of prefill stops writing into rank 0 of decode; all go on with what the others need."""
    with prefill_group(2, [(4, BLOCK, 1), (1, BLOCK, 1)], tmp_path) as group:
        four, one = group.decodes
        revoked, other = group.add(job("revoked", four, 600, 1)), group.add(job("other", one, 700, 30))
        group.forward({"revoked": 300, "other": 300})
        four.cancel("revoked", [0])
        assert group.step_until(lambda: ("revoked", 0) in four.ended)
        group.forward({"revoked": 600, "other": 700})
        assert group.step_until(lambda: all(group.outcomes("revoked", "other")))
        assert [four.ended["revoked", rank] for rank in range(4)] == [False, True, True, True]
        assert one.outcomes("other") == {True}
        other.require_exact()
        after = group.add(job("after", four, 500, 60))
        group.forward({"after": 500})
        require_received(group, after)
        require_let_go(group, revoked.name, "other", "after")


def test_a_request_that_prefill_aborts_in_the_middle_is_released_and_the_others_are_exact(tmp_path: Path) -> None:
    with prefill_group(2, [(1, BLOCK, 1)], tmp_path) as group:
        (one,) = group.decodes
        group.add(job("aborted", one, 900, 1))
        other = group.add(job("other", one, 800, 40))
        group.forward({"aborted": 500, "other": 500})
        group.finish("aborted")
        group.forward({"other": 800})
        assert group.step_until(lambda: all(group.outcomes("aborted", "other")))
        assert group.outcomes("aborted", "other") == [{False}, {True}]
        assert all("prefill ended before the prompt was computed" in reason for _, _, reason in one.losses)
        other.require_exact()
        group.finish("other")
        assert group.step_until(lambda: group.are_released("aborted", "other"))
        group.require_no_staging_taken()


def preempt_while_the_other_rank_is_late(group: PrefillGroup, late_s: float) -> Job:
    """Rank 1 loses its blocks when rank 0, which wants its heads of them, has not come yet."""
    (one,) = group.decodes
    again = group.add(job("again", one, 900, 1))
    group.ranks[0].pipe.send(("pause", late_s))
    group.forward({"again": 500})
    group.forward({}, preempted=["again"])
    group.forward({"again": 300})
    group.forward({"again": 900})
    assert group.step_until(lambda: bool(group.outcomes("again")[0]))
    group.finish("again")
    assert group.step_until(lambda: group.are_released("again"))
    group.require_no_staging_taken()
    return again


def test_preempted_blocks_are_not_overwritten_before_the_other_ranks_have_read_them(tmp_path: Path) -> None:
    """The forward pass waits for them; then vLLM computes the request again."""
    with prefill_group(2, [(1, BLOCK, 1)], tmp_path, msgspec.structs.replace(QUICK, preempt_wait_s=30.0)) as group:
        again = preempt_while_the_other_rank_is_late(group, 0.5)
        assert group.outcomes("again") == [{True}]
        again.require_exact()


def test_a_request_whose_blocks_are_overwritten_too_early_fails_and_is_never_torn(tmp_path: Path) -> None:
    with prefill_group(2, [(1, BLOCK, 1)], tmp_path, msgspec.structs.replace(QUICK, preempt_wait_s=0.2)) as group:
        preempt_while_the_other_rank_is_late(group, 1.5)
        assert group.outcomes("again") == [{False}]
        assert any("prefill preempted the request" in reason for _, _, reason in group.decodes[0].losses)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_blocks_are_held_until_the_other_ranks_have_read_them(tmp_path: Path, *, is_cancelled: bool) -> None:
    """A rank that owns no stripe of the prompt has nothing to write, but the owner is late and wants its heads.

    It wants them also when decode has given the request up: it does not know that yet.
    """
    with prefill_group(2, [(1, BLOCK, 1)], tmp_path) as group:
        (one,) = group.decodes
        short = group.add(job("short", one, 100, 1))
        owner, supplier = group.ranks
        begin = time.monotonic()
        owner.pipe.send(("pause", 1.0))
        group.forward({"short": 100})
        if is_cancelled:
            one.cancel("short")
        free = supplier.ask("finished", ("short",))
        while not free and time.monotonic() - begin < 15:
            free = supplier.ask("finished", ())
        assert free == {"short"}
        assert time.monotonic() - begin >= 1.0, "its blocks were free before the owner had read them"
        assert group.step_until(lambda: one.outcomes("short") == {not is_cancelled})
        if not is_cancelled:
            short.require_exact()


def test_a_rank_without_bytes_of_its_own_is_not_done_before_the_others_have_read_its_heads(tmp_path: Path) -> None:
    """Blocks that are taken away too early after the prompt's last step: only a push that is not done can fail."""
    with prefill_group(2, [(1, BLOCK, 1)], tmp_path, msgspec.structs.replace(QUICK, preempt_wait_s=0.2)) as group:
        (one,) = group.decodes
        group.add(job("short", one, 100, 1))
        group.ranks[0].pipe.send(("pause", 1.5))
        group.forward({"short": 100})
        group.forward({}, preempted=["short"])
        assert group.step_until(lambda: one.outcomes("short") == {False})


def test_a_rank_that_dies_fails_the_pushes_of_the_others_soon_and_with_a_reason(tmp_path: Path) -> None:
    with prefill_group(4, [(1, BLOCK, 1), (2, BLOCK, 1)], tmp_path) as group:
        one, two = group.decodes
        group.add(job("to one", one, 900, 1))
        group.add(job("to two", two, 900, 40))
        group.forward({"to one": 500, "to two": 500})
        assert group.step_until(lambda: bool(one.caches[0].regions[-1].any()))
        pid = group.ranks[2].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        group.ranks[2].process.join()
        begin = time.monotonic()
        group.forward({"to one": 900, "to two": 900})
        assert group.step_until(lambda: all(group.outcomes("to one", "to two")))
        assert group.outcomes("to one", "to two") == [{False}, {False}]
        assert time.monotonic() - begin < QUICK.reshard_timeout_s / 2
        assert any("cannot exchange KV with the other ranks" in reason for _, _, reason in one.losses)
        require_let_go(group, "to one", "to two")
        push_whole(group, job("later", one, 300, 90))
        assert group.step_until(lambda: one.outcomes("later") == {False})
        group.finish("later")
        assert group.step_until(lambda: group.are_released("later"))


def test_a_small_staging_memory_slows_a_push_down_and_spoils_nothing(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(QUICK, staging_bytes=64 << 10)
    with prefill_group(2, [(1, BLOCK, 1)], tmp_path, settings) as group:
        (one,) = group.decodes
        jobs = [job("a", one, 1500, 1), job("b", one, 1200, 60)]
        push_whole(group, *jobs)
        require_received(group, *jobs)
        group.require_no_staging_taken()


def test_pushes_that_wait_for_a_grant_lose_their_staging_memory_to_others(tmp_path: Path) -> None:
    """Decode never expects the first request: its parts fill the staging memory, and must not stop the second one."""
    settings = msgspec.structs.replace(QUICK, staging_bytes=64 << 10)
    with prefill_group(2, [(1, BLOCK, 1), (4, BLOCK, 1)], tmp_path, settings) as group:
        one, four = group.decodes
        stuck, other = replace(job("stuck", one, 1500, 1), deadline_ms=20_000), job("other", four, 900, 60)
        group.add(stuck, is_expected=False)
        group.add(other)
        group.forward({"stuck": 1500, "other": 900})
        require_received(group, other)
        require_let_go(group, "stuck", "other")


def test_a_decode_engine_that_is_gone_costs_its_own_pushes_only_and_no_staging_memory(tmp_path: Path) -> None:
    """It goes in the middle of a push; the next request finds nobody to say hello to."""
    settings = msgspec.structs.replace(QUICK, handshake_timeout_s=10.0)
    with prefill_group(2, [(1, BLOCK, 1), (4, BLOCK, 1), (1, BLOCK, 1)], tmp_path, settings) as group:
        gone, four, never = group.decodes
        group.add(job("cut", gone, 900, 1))
        other = group.add(job("other", four, 900, 40))
        group.forward({"cut": 500, "other": 500})
        assert group.step_until(lambda: bool(gone.caches[0].regions[-1].any()))
        group.add(job("refused", never, 300, 80), is_expected=False)
        for decode in (gone, never):
            decode.close()
            group.decodes.remove(decode)
        group.forward({"cut": 900, "other": 900, "refused": 300})
        require_received(group, other)
        group.finish("cut", "other", "refused")
        assert group.step_until(lambda: group.are_released("cut", "other", "refused"))
        group.require_no_staging_taken()
