"""Decode's scheduler half: when it reserves, and how a request's wait ends."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest

from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.scheduler.decode import DecodeEngine, DecodeScheduler
from pdcluster_connector.steps import ContentOrder, DecodeStep
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.metaserver import PrefillOutcome, failed, succeeded
from pdcluster_protocol.params import (
    ContentCheck,
    DecodeCall,
    DecodeParams,
    Reservation,
    SideChannelAddress,
    to_wire,
)
from pdcluster_protocol.prompt_digest import digest_prompt
from pdcluster_protocol.secret import make_secret

SECRET = make_secret("of this cluster!")
R = RequestId("r")
TOKENS = list(range(40))
ADDRESS = SideChannelAddress("h", 7, BootId("b"))
STATE = KvGroup(1, is_state=True)


def decode_params() -> DecodeParams:
    transfer = TransferId("t")
    token = SECRET.mint(transfer, Attempt(1), 60_000)
    return DecodeParams(metaserver="http://r/m", transfer_id=transfer, deadline_ms=60_000, token=token)


@dataclass
class FakeMetaserver:
    posts: list[tuple[RequestId, str, Reservation, float]] = field(default_factory=list)
    cut: list[RequestId] = field(default_factory=list)

    def post(self, request_id: RequestId, url: str, said: DecodeCall, *, deadline: float) -> None:
        if isinstance(said, Reservation):  # What else is said: test_local_prefill.py.
            self.posts.append((request_id, url, said, deadline))

    def cancel(self, request_id: RequestId) -> None:
        self.cut.append(request_id)


class Bench:
    def __init__(self, *more_groups: KvGroup, check: ContentCheck = ContentCheck.OFF) -> None:
        self.metaserver = FakeMetaserver()
        self.outcomes: deque[tuple[RequestId, PrefillOutcome]] = deque()
        groups = (KvGroup(16), *more_groups)
        engine = DecodeEngine(
            EngineId("d"), 1, groups, (ADDRESS,), SECRET, transfer_protocol="tcp", content_check=check
        )
        self.scheduler = DecodeScheduler(engine, self.metaserver, self.outcomes)

    def add(self, request_id: RequestId = R, **changed: object) -> None:
        """A request with ``decode_params()``, of which some are ``changed``."""
        params = msgspec.structs.replace(decode_params(), **changed)
        self.scheduler.add(request_id, to_wire(params), TOKENS, now=0.0)

    def lose(self, attempt: int = 1, now: float = 20.0) -> None:
        self.scheduler.attempt_lost(R, Attempt(attempt), "why", now=now)

    def posts_of_step(self) -> list[Reservation]:
        """What the next step asks of the router."""
        before = len(self.metaserver.posts)
        self.scheduler.step()
        return [post[2] for post in self.metaserver.posts[before:]]

    def reserve(self, external: int = 40, now: float = 10.0) -> None:
        self.scheduler.reserve(R, ([5, 6, 7, 8],), external, now=now)


def waiting_bench(*, wants_receipt: bool = False) -> Bench:
    bench = Bench()
    bench.add(wants_receipt=wants_receipt)
    bench.reserve()
    bench.scheduler.step()
    return bench


def test_the_reservation_leaves_with_the_step_that_tells_the_workers() -> None:
    bench = Bench()
    bench.add()
    assert bench.scheduler.external_tokens(R, 0) == 40
    bench.reserve()
    assert bench.metaserver.posts == []
    (expect,) = bench.scheduler.step().expects
    ((_, url, reservation, deadline),) = bench.metaserver.posts
    assert (url, deadline) == ("http://r/m", 60.0)
    assert reservation.remote_block_ids == ((5, 6, 7),)
    assert (reservation.deadline_ms, reservation.token) == (50_000, decode_params().token)
    assert (reservation.attempt, reservation.lost_attempt) == (1, 0)
    assert reservation.remote_side_channels == (ADDRESS,)
    assert (expect.request_id, expect.transfer_id) == (R, TransferId("t"))
    assert (expect.spans, expect.deadline_ms) == ((((0, 40),),), 50_000)


def test_cached_blocks_are_not_expected() -> None:
    bench = Bench()
    bench.add()
    assert bench.scheduler.external_tokens(R, 16) == 24
    bench.reserve(external=24)
    (expect,) = bench.scheduler.step().expects
    assert expect.spans == (((16, 40),),)
    assert bench.metaserver.posts[0][2].remote_cached_tokens == 16


def test_a_prompt_that_lacks_only_its_last_token_needs_no_push() -> None:
    bench = Bench()
    bench.scheduler.add(R, to_wire(decode_params()), [1] * 33, now=0.0)
    assert bench.scheduler.external_tokens(R, 32) == 0


def test_decode_keeps_the_last_token_of_a_prompt_with_state_for_itself() -> None:
    """It goes on from the state before that token; prefill leaves it out too (``test_connector.py``)."""
    bench = Bench(STATE)
    bench.add()
    assert [bench.scheduler.external_tokens(R, cached) for cached in (0, 16, 38, 39)] == [39, 23, 1, 0]
    bench.scheduler.reserve(R, ([5, 6, 7, 8], [9]), 23, now=10.0)
    (expect,) = bench.scheduler.step().expects
    assert expect.spans == (((16, 39),), ((0, 1),))
    ((_, _, reservation, _),) = bench.metaserver.posts
    assert (reservation.num_prompt_tokens, reservation.remote_cached_tokens) == (39, 16)
    assert reservation.prompt_digest == digest_prompt(TOKENS[:39])
    assert reservation.remote_block_ids == ((5, 6, 7), (9,))


def test_the_reservation_tells_prefill_which_images_decode_has() -> None:
    bench = Bench()
    bench.scheduler.add(R, to_wire(decode_params()), TOKENS, None, ["1 3 cat"], now=0.0)
    bench.reserve()
    bench.scheduler.step()
    ((_, _, reservation, _),) = bench.metaserver.posts
    assert reservation.prompt_digest == digest_prompt(TOKENS, ["1 3 cat"])


@pytest.mark.parametrize(
    ("more_groups", "num_kept_back"),
    [((), 0), ((KvGroup(32),), 0), ((STATE,), 1), ((KvGroup(16, is_windowed=True),), 1)],
)
def test_only_state_and_windows_keep_a_token_back(more_groups: tuple[KvGroup, ...], num_kept_back: int) -> None:
    groups = (KvGroup(16), *more_groups)
    assert DecodeEngine(EngineId("d"), 1, groups, (ADDRESS,), SECRET).num_kept_back == num_kept_back


def test_a_request_asks_once_so_a_preempted_or_failed_one_is_computed_here() -> None:
    bench = waiting_bench()
    assert bench.scheduler.external_tokens(R, 0) == 0
    bench.reserve(external=0)
    assert bench.scheduler.step().expects == ()


def test_asking_how_many_tokens_has_no_side_effect() -> None:
    bench = Bench()
    bench.add()
    assert [bench.scheduler.external_tokens(R, 0) for _ in range(3)] == [40, 40, 40]
    assert bench.scheduler.step().expects == ()


def test_a_failed_outcome_cancels_the_wait_once() -> None:
    bench = waiting_bench()
    bench.outcomes.append((R, failed("prefill answered 500")))
    (cancel,) = bench.scheduler.step().cancels
    assert cancel.request_id == R
    assert "prefill answered 500" in cancel.reason
    bench.scheduler.finish(R)
    assert bench.scheduler.step().cancels == ()


def test_a_good_outcome_is_not_completion() -> None:
    bench = waiting_bench()
    bench.outcomes.append((R, succeeded(Attempt(1))))
    assert bench.scheduler.step().cancels == ()


def test_an_abort_while_waiting_cancels_the_wait_and_cuts_the_call() -> None:
    bench = waiting_bench()
    bench.scheduler.finish(R)
    (cancel,) = bench.scheduler.step().cancels
    assert "aborted" in cancel.reason
    assert bench.metaserver.cut == [R]


def test_a_request_that_was_received_and_ends_normally_cancels_nothing() -> None:
    bench = waiting_bench()
    bench.scheduler.received([R])
    bench.scheduler.finish(R)
    assert bench.scheduler.step().cancels == ()


def test_an_outcome_after_the_end_is_ignored() -> None:
    bench = waiting_bench()
    bench.scheduler.received([R])
    bench.outcomes.append((R, failed("late")))
    assert bench.scheduler.step().cancels == ()


def test_a_second_sequence_of_a_live_transfer_is_refused_and_the_first_goes_on() -> None:
    bench, second = waiting_bench(), RequestId("second")
    bench.add(second)
    assert bench.scheduler.external_tokens(second, 0) == 40
    bench.scheduler.reserve(second, ([9, 10, 11, 12],), 40, now=10.0)
    step = bench.scheduler.step()
    assert [e.request_id for e in step.expects] == [c.request_id for c in step.cancels] == [second]
    assert "transfer t has a sequence on this decode engine already" in step.cancels[0].reason
    assert len(bench.metaserver.posts) == 1
    assert bench.scheduler.finish(second) is None
    bench.outcomes.append((R, succeeded(Attempt(1))))
    assert [ended.request_id for ended in bench.scheduler.step().ended] == [R]


def test_the_same_parameters_already_aborted_under_another_id_change_nothing() -> None:
    """What vLLM's API layer does after a load failure or a timeout."""
    bench, again = waiting_bench(), RequestId("again")
    bench.add(again)
    bench.scheduler.finish(again)
    assert bench.scheduler.step() == DecodeStep()
    bench.add(RequestId("third"))
    assert bench.scheduler.external_tokens(RequestId("third"), 0) == 40
    assert len(bench.metaserver.posts) == 1


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        pytest.param({"do_remote_prefill": True}, "version None, ours is 1", id="not of this version"),
        pytest.param({**to_wire(decode_params()), "token": ""}, "without a token", id="without the router's token"),
    ],
)
def test_bad_parameters_reserve_nothing_and_fail_the_request_in_vllms_own_way(
    params: dict[str, object], reason: str
) -> None:
    bench = Bench()
    bench.scheduler.add(R, params, TOKENS, now=0.0)
    assert bench.scheduler.external_tokens(R, 0) == 40
    bench.reserve()
    step = bench.scheduler.step()
    assert [e.request_id for e in step.expects] == [c.request_id for c in step.cancels] == [R]
    assert reason in step.cancels[0].reason
    assert bench.metaserver.posts == []


def test_a_prompt_that_was_cached_whole_asks_for_no_push_after_a_preemption() -> None:
    bench = Bench()
    bench.add()
    bench.reserve(external=0)
    assert bench.scheduler.external_tokens(R, 0) == 0
    bench.scheduler.finish(R)
    assert bench.scheduler.step().cancels == ()


def test_a_lost_attempt_asks_for_the_next_one_with_the_same_blocks_and_the_time_that_is_left() -> None:
    bench = waiting_bench()
    first = bench.metaserver.posts[0][2]
    bench.lose(now=20.0)
    (again,) = bench.posts_of_step()
    assert (again.lost_attempt, again.lost_reason, again.deadline_ms) == (1, "why", 40_000)
    assert msgspec.structs.replace(again, lost_attempt=0, lost_reason="", deadline_ms=50_000) == first


def test_an_attempt_that_two_ranks_lose_is_asked_for_once() -> None:
    bench = waiting_bench()
    bench.lose()
    bench.lose()
    assert len(bench.posts_of_step()) == 1
    bench.lose()
    assert bench.posts_of_step() == []


def test_each_further_attempt_that_is_lost_is_asked_for() -> None:
    bench = waiting_bench()
    bench.lose(1)
    bench.lose(2)
    assert [post.lost_attempt for post in bench.posts_of_step()] == [1, 2]


def test_a_lower_attempt_that_is_lost_late_asks_for_nothing() -> None:
    bench = waiting_bench()
    bench.lose(2)
    bench.lose(1)
    assert [post.lost_attempt for post in bench.posts_of_step()] == [2]


def test_an_attempt_may_be_lost_after_a_good_outcome() -> None:
    bench = waiting_bench()
    bench.outcomes.append((R, succeeded(Attempt(1))))
    bench.scheduler.step()
    bench.lose()
    assert [post.lost_attempt for post in bench.posts_of_step()] == [1]


def test_the_outcome_of_a_second_call_ends_the_wait_as_that_of_the_first_would() -> None:
    bench = waiting_bench()
    bench.lose()
    bench.outcomes.append((R, failed("no attempt left")))
    (cancel,) = bench.scheduler.step().cancels
    assert "no attempt left" in cancel.reason
    bench.outcomes.append((R, failed("no attempt left")))
    assert bench.scheduler.step().cancels == ()


def test_what_was_not_posted_before_the_request_ended_is_never_posted() -> None:
    bench, again = Bench(), waiting_bench()
    bench.add()
    bench.reserve()
    again.lose()
    for one in (bench, again):
        one.scheduler.finish(R)
        assert one.posts_of_step() == []


@pytest.mark.parametrize("is_received", [False, True])
def test_a_request_that_is_over_asks_for_no_further_attempt(is_received: bool) -> None:
    bench = waiting_bench()
    if is_received:
        bench.scheduler.received([R])
    else:
        bench.scheduler.finish(R)
    bench.lose()
    assert bench.posts_of_step() == []


def receipt_of(*, wants: bool = True, ended: bool = True, failed: bool = False, cached: int = 0) -> object:
    """What decode's answer says of a prompt of 40 tokens, ``cached`` of which decode had."""
    bench = Bench()
    bench.add(wants_receipt=wants)
    bench.reserve(bench.scheduler.external_tokens(R, cached))
    bench.scheduler.step()
    if failed:
        bench.scheduler.received([], failed=[R])
    if ended:
        bench.scheduler.received([R])
    return bench.scheduler.finish(R)


@pytest.mark.parametrize(
    ("receipt", "num_tokens"),
    [
        pytest.param(receipt_of(), 40, id="all"),
        pytest.param(receipt_of(cached=16), 24, id="behind what was cached"),
        pytest.param(receipt_of(cached=40), 0, id="nothing was missing"),
        pytest.param(receipt_of(failed=True), 0, id="a rank failed"),
        pytest.param(receipt_of(ended=False), 0, id="the wait did not end"),
    ],
)
def test_an_answer_says_how_much_was_pushed(receipt: object, num_tokens: int) -> None:
    assert receipt == {
        "pdcluster_received_tokens": num_tokens,
        "pdcluster_is_content_compared": num_tokens > 0,
        "pdcluster_transfer_protocol": "tcp",
    }


def test_an_answer_says_nothing_where_that_was_not_wanted_or_the_parameters_were_refused() -> None:
    assert receipt_of(wants=False) is None
    bench = Bench()
    bench.add(token="a stranger's", wants_receipt=True)
    assert bench.scheduler.finish(R) is None


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("setting", ContentCheck)
def test_a_request_whose_content_is_compared_is_announced_with_decodes_own_blocks_and_prefill_is_told(
    *, wants: bool, setting: ContentCheck
) -> None:
    bench = Bench(check=setting)
    bench.add(wants_receipt=wants)
    bench.reserve()
    (expect,) = bench.scheduler.step().expects
    ((_, _, reservation, _),) = bench.metaserver.posts
    assert expect.is_proof is wants
    check = ContentCheck.FULL if wants else setting
    assert reservation.content_check is check
    order = ContentOrder(expect.spans, ((5, 6, 7),), check)
    assert expect.content == (None if check is ContentCheck.OFF else order)
