"""Prefill's scheduler half: which blocks leave at which step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdcluster_connector.core.adapters import AdapterRequest
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.scheduler.prefill import PrefillEngine, PrefillScheduler, Scheduled
from pdcluster_connector.settings import PushTiming
from pdcluster_connector.steps import PrefillStep
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.params import (
    ContentCheck,
    Reservation,
    SideChannelAddress,
    for_attempt,
    sealed,
    to_wire,
)
from pdcluster_protocol.prompt_digest import digest_prompt
from pdcluster_protocol.secret import make_secret

LIFE = BootId("life")
SECRET, STRANGER = make_secret("of this cluster!"), make_secret("of another one !")
TOKENS = list(range(100, 140))
R = RequestId("r")
TABLE = ([11, 12, 13],)


def reservation(cached: int = 0) -> Reservation:
    return Reservation(
        request_id="d-r",
        remote_block_ids=((21, 22, 23),),
        remote_block_size=16,
        remote_engine_id=EngineId("d"),
        remote_host="h",
        remote_port=1,
        remote_tp_size=1,
        remote_cached_tokens=cached,
        transfer_id=TransferId("t"),
        attempt=Attempt(1),
        deadline_ms=60_000,
        token=SECRET.mint(TransferId("t"), Attempt(1), 60_000),
        remote_boot_id=BootId("b"),
        remote_side_channels=(SideChannelAddress("h", 1, BootId("b")),),
        num_prompt_tokens=len(TOKENS),
        prompt_digest=digest_prompt(TOKENS),
    )


def new_scheduler(timing: PushTiming = PushTiming.LAYERWISE) -> PrefillScheduler:
    return PrefillScheduler(PrefillEngine(1, (8,), (KvGroup(16),)), timing, SECRET, LIFE)


def scheduler(wanted: Reservation, timing: PushTiming = PushTiming.LAYERWISE) -> PrefillScheduler:
    made = new_scheduler(timing)
    made.add(R, to_wire(sealed(wanted, SECRET)), TOKENS, now=0.0)
    return made


def step(made: PrefillScheduler, computed: int, now: float = 1.0) -> PrefillStep:
    return made.step([Scheduled(R, computed)], (), lambda _: TABLE, now=now)


def blocks(made: PrefillStep) -> list[tuple[tuple[int, ...], tuple[int, ...], bool]]:
    groups = ((part.groups[0], part.is_last) for part in made.slices)
    return [(tuple(group.source_blocks), tuple(group.target_blocks), is_last) for group, is_last in groups]


def test_chunks_leave_block_by_block_and_the_last_one_with_the_prompt() -> None:
    made = scheduler(reservation())
    assert blocks(step(made, 20)) == [((11,), (21,), False)]
    assert blocks(step(made, 30)) == []
    assert blocks(step(made, 40)) == [((12, 13), (22, 23), True)]
    assert blocks(step(made, 41)) == []


def test_the_first_step_announces_the_push_even_without_a_complete_block() -> None:
    assert blocks(step(scheduler(reservation()), 5)) == [((), (), False)]


def test_decodes_cached_blocks_are_not_pushed() -> None:
    assert blocks(step(scheduler(reservation(cached=16)), 40)) == [((12, 13), (22, 23), True)]


def test_prefills_own_cache_hit_is_pushed_at_once() -> None:
    assert blocks(step(scheduler(reservation()), 33)) == [((11, 12), (21, 22), False)]


def test_serial_mode_holds_everything_back_until_the_prompt_is_computed() -> None:
    made = scheduler(reservation(), PushTiming.SERIAL)
    assert blocks(step(made, 32)) == [((), (), False)]
    assert blocks(step(made, 40)) == [((11, 12, 13), (21, 22, 23), True)]


def test_the_deadline_goes_on_as_what_is_left_of_it() -> None:
    (part,) = step(scheduler(reservation()), 40, now=10.0).slices
    assert part.target.deadline_ms == 50_000


@pytest.mark.parametrize(("pages", "expected"), [((), (16,)), ((8,), (8,))])
def test_workers_learn_decodes_blocks_and_pages(pages: tuple[int, ...], expected: tuple[int, ...]) -> None:
    (part,) = step(scheduler(msgspec.structs.replace(reservation(), remote_page_sizes=pages)), 40).slices
    assert (part.target.block_tokens, part.target.page_tokens) == ((16,), expected)


def test_blocks_are_kept_after_the_end_only_when_a_worker_knows_the_request() -> None:
    assert scheduler(reservation()).finish(R) == (False, None)
    made = scheduler(reservation())
    step(made, 5)
    assert made.finish(R) == (True, None)
    assert made.finish(R) == (False, None)


def test_only_preempted_requests_with_a_transfer_are_protected() -> None:
    made = scheduler(reservation())
    assert made.step([], [R, RequestId("other")], lambda _: TABLE, now=1.0).preempted == (R,)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"remote_block_size": 24}, ["block sizes 16 and 24 do not divide", "--block-size"]),
        ({"prompt_digest": "other"}, ["other tokens or images", "tokenizer"]),
        ({"prompt_digest": digest_prompt(TOKENS, ["1 3 cat"])}, ["other tokens or images", "the same bytes"]),
        ({"num_prompt_tokens": 39}, ["39 prompt tokens, this one has 40"]),
        ({"remote_block_ids": ((21, 22),)}, ["reserved 2 blocks, and this prompt needs 3"]),
        ({"remote_block_ids": ()}, ["0 KV groups, ours is 1", "--disable-hybrid-kv-cache-manager"]),
        (
            {
                "remote_tp_size": 3,
                "remote_side_channels": tuple(SideChannelAddress("h", 1 + rank, BootId("b")) for rank in range(3)),
            },
            ["decode engine d has TP 3, prefill has TP 1", "8 KV heads cannot be spread over TP 3", "that divides"],
        ),
        ({"remote_cached_tokens": 7}, ["7 cached tokens"]),
        ({"remote_page_sizes": (32,)}, ["pages of (32,) tokens for blocks of (16,)"]),
        ({"token": ""}, ["without a token", "through the router"]),
        ({"token": STRANGER.mint(TransferId("t"), Attempt(1), 60_000)}, ["not valid here", "PDCLUSTER_SECRET"]),
        ({"attempt": Attempt(2)}, ["attempt 2", "not valid here"]),
    ],
)
def test_a_reservation_that_cannot_be_filled_is_refused_in_the_answer(
    changed: dict[str, object], words: list[str]
) -> None:
    made = scheduler(msgspec.structs.replace(reservation(), **changed))
    assert step(made, 40).slices == ()
    delay_free, params = made.finish(R)
    assert not delay_free
    assert params is not None
    assert all(word in str(params["pdcluster_reason"]) for word in words)


def test_a_transfer_that_runs_already_is_refused_under_a_second_request_id() -> None:
    assert "has a sequence here already" in refusal_of_second(scheduler(reservation()), now=0.0)


def test_a_second_sequence_is_refused_also_when_the_first_has_ended_and_until_its_deadline_when_it_is_freed() -> None:
    """With n 2 vLLM schedules the second one when the first may have ended, and lanes still know that."""
    made = scheduler(reservation())
    step(made, 40)
    assert made.finish(R) == (True, None)
    assert "has a sequence here already" in refusal_of_second(made, now=1_000.0)
    made.freed([R])
    assert "has a sequence here already" in refusal_of_second(made, now=59.0)
    assert refusal_of_second(made, now=61.0) == ""


def test_a_request_that_ended_before_it_was_pushed_is_remembered_likewise() -> None:
    made = scheduler(reservation())
    assert made.finish(R) == (False, None)
    assert "has a sequence here already" in refusal_of_second(made, now=59.0)
    assert refusal_of_second(made, now=61.0) == ""


def refusal_of_second(made: PrefillScheduler, now: float) -> str:
    """Of the same reservation under another request id."""
    again = RequestId("again")
    made.add(again, to_wire(sealed(reservation(), SECRET)), TOKENS, now=now)
    _, params = made.finish(again)
    return str((params or {}).get("pdcluster_reason", ""))


def test_the_next_attempt_of_a_transfer_that_runs_here_is_another_push() -> None:
    made = scheduler(reservation())
    token = SECRET.mint(TransferId("t"), Attempt(2), 9_000)
    second = for_attempt(sealed(reservation(), SECRET), Attempt(2), token, 9_000)
    made.add(RequestId("again"), to_wire(second), TOKENS, now=0.0)
    both = [Scheduled(R, 40), Scheduled(RequestId("again"), 40)]
    parts = made.step(both, (), lambda _: TABLE, now=1.0).slices
    assert [(part.attempt, part.attempt_token) for part in parts] == [(1, reservation().token), (2, token)]
    assert [part.target.deadline_ms for part in parts] == [59_000, 8_000]


def test_every_step_names_the_life_of_the_engine_also_one_that_pushes_nothing() -> None:
    made = scheduler(reservation())
    idle = made.step((), (), lambda _: TABLE, now=1.0)
    assert {idle.life, step(made, 20).life} == {LIFE}


OTHERS = (SideChannelAddress("10.9.9.9", 4444, BootId("b")),)
STOLEN: dict[str, dict[str, Any]] = {
    "other blocks": {"remote_block_ids": ((91, 92, 93),)},
    "another address": {"remote_side_channels": OTHERS},
    "another host": {"remote_host": "10.9.9.9"},
    "another engine": {"remote_engine_id": EngineId("evil")},
    "another life": {"remote_boot_id": BootId("c")},
    "less that decode has": {"remote_cached_tokens": 16},
    "sums": {"content_check": ContentCheck.FULL},
    "no seal": {"seal": ""},
    "a seal of another cluster": {"seal": sealed(reservation(), STRANGER).seal},
    "a seal that is no text": {"seal": "\ud800"},
}
UNREADABLE: dict[str, dict[str, Any]] = {
    "half a character": {"request_id": "\ud800"},
    "must be in": {"remote_block_ids": ((1 << 70, 22, 23),)},
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *((changes, "seal") for changes in STOLEN.values()),
        *((changes, reason) for reason, changes in UNREADABLE.items()),
    ],
    ids=[*STOLEN, *UNREADABLE],
)
def test_who_has_read_an_order_cannot_have_the_kv_pushed_elsewhere(changes: dict[str, Any], reason: str) -> None:
    order = msgspec.structs.replace(sealed(reservation(), SECRET), **changes)
    made = new_scheduler()
    made.add(R, to_wire(order), TOKENS, now=0.0)
    assert blocks(step(made, 40)) == []
    assert reason in str(made.finish(R))


def test_a_seal_that_came_over_the_wire_fits_every_attempt() -> None:
    token = SECRET.mint(TransferId("t"), Attempt(3), 9_000)
    order = for_attempt(sealed(reservation(), SECRET), Attempt(3), token, 9_000)
    made = new_scheduler()
    made.add(R, msgspec.json.decode(msgspec.json.encode(order)), TOKENS, now=0.0)
    assert blocks(step(made, 40)) == [((11, 12, 13), (21, 22, 23), True)]


def test_each_slice_names_the_adapter_with_which_its_request_is_computed() -> None:
    made, adapter = new_scheduler(), AdapterRequest(3, "sql", "/adapters/sql", "use")
    made.add(R, to_wire(sealed(reservation(), SECRET)), TOKENS, adapter, now=0.0)
    assert [part.adapter for computed in (20, 40) for part in step(made, computed).slices] == [adapter, adapter]
    assert [part.adapter for part in step(scheduler(reservation()), 40).slices] == [None]
