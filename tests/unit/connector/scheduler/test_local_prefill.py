"""What decode computes itself instead of asking for a push, and what the router hears of it."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest

from pdcluster_connector.core.local_prefill import is_local
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.failures import LOCAL_PREFILL_TOKENS, LOCAL_PREFILLS, take_counts
from pdcluster_connector.scheduler.decode import DecodeEngine, DecodeScheduler
from pdcluster_connector.steps import DecodeStep
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.metaserver import PrefillOutcome, failed
from pdcluster_protocol.params import DecodeCall, DecodeParams, LocalPrefill, Reservation, SideChannelAddress, to_wire
from pdcluster_protocol.secret import make_secret

SECRET = make_secret("of this cluster!")
STATE = KvGroup(1, is_state=True)
WINDOW = KvGroup(16, is_windowed=True)
A, B = RequestId("a"), RequestId("b")


class Scene:
    """A decode scheduler, and vLLM's part around it."""

    def __init__(self, min_push_tokens: int, *more_groups: KvGroup) -> None:
        self.outcomes: deque[tuple[RequestId, PrefillOutcome]] = deque()
        self.posts: list[DecodeCall] = []
        self.cut: list[RequestId] = []
        address = SideChannelAddress("h", 7, BootId("b"))
        groups = (KvGroup(16), *more_groups)
        engine = DecodeEngine(EngineId("d"), 1, groups, (address,), SECRET, min_push_tokens=min_push_tokens)
        self.scheduler = DecodeScheduler(engine, self, self.outcomes)
        take_counts()

    def post(self, request_id: RequestId, url: str, said: DecodeCall, *, deadline: float) -> None:
        self.posts.append(said)

    def cancel(self, request_id: RequestId) -> None:
        self.cut.append(request_id)

    def add(self, request_id: RequestId, num_tokens: int, transfer: str = "", **changed: object) -> None:
        params = params_of(transfer or f"t-{request_id}")
        wire = to_wire(msgspec.structs.replace(params, **changed))
        self.scheduler.add(request_id, wire, list(range(num_tokens)), now=0.0)

    def schedule(self, request_id: RequestId, cached: int = 0) -> int:
        """As vLLM does: it asks, it allocates, and says so. Returns the tokens that a push shall bring."""
        external = self.scheduler.external_tokens(request_id, cached)
        tables = [[5] * 64 for _ in self.scheduler._engine.groups]  # as many blocks as any prompt here
        self.scheduler.reserve(request_id, tables, external, now=10.0)
        return external

    def step(self) -> list[DecodeCall]:
        """What the step tells the router."""
        self.posts = []
        self.scheduler.step()
        return self.posts


def params_of(transfer: str) -> DecodeParams:
    transfer_id = TransferId(transfer)
    token = SECRET.mint(transfer_id, Attempt(1), 60_000)
    return DecodeParams(metaserver="http://r/m", transfer_id=transfer_id, deadline_ms=60_000, token=token)


@pytest.mark.parametrize(
    ("missing", "least", "in_step", "expected"),
    [
        (1, 0, 0, True),
        (1, 8, 8, True),
        (2, 0, 0, False),
        (2, 1, 0, False),
        (2, 3, 0, True),
        (63, 64, 0, True),
        (64, 64, 0, False),
        (40, 64, 20, True),
        (44, 64, 20, True),
        (45, 64, 20, False),
    ],
)
def test_few_tokens_are_local_until_a_step_has_enough_of_them(
    missing: int, least: int, in_step: int, *, expected: bool
) -> None:
    assert is_local(missing, min_push_tokens=least, num_in_step=in_step) is expected


@pytest.mark.parametrize("groups", [(), (STATE,), (WINDOW,)], ids=["attention", "state", "window"])
def test_few_missing_tokens_reserve_nothing_and_the_router_is_told(groups: tuple[KvGroup, ...]) -> None:
    scene = Scene(32, *groups)
    scene.add(A, 100)
    assert scene.schedule(A, cached=80) == 0
    (said,) = scene.step()
    assert said == LocalPrefill(
        transfer_id=TransferId("t-a"),
        attempt=Attempt(1),
        deadline_ms=50_000,
        token=params_of("t-a").token,
        num_prompt_tokens=100,
        num_local_tokens=20,
    )
    assert take_counts() == {LOCAL_PREFILLS: 1, LOCAL_PREFILL_TOKENS: 20}


def test_as_many_as_the_setting_says_are_pushed() -> None:
    scene = Scene(32)
    scene.add(A, 112)
    assert scene.schedule(A, cached=80) == 32
    assert isinstance(scene.step()[0], Reservation)
    assert take_counts() == {}


def test_by_default_all_is_pushed() -> None:
    scene = Scene(0)
    scene.add(A, 2)
    assert scene.schedule(A) == 2
    assert isinstance(scene.step()[0], Reservation)


def test_a_prompt_that_is_cached_whole_tells_the_router_and_is_not_counted() -> None:
    scene = Scene(0)
    scene.add(A, 81)
    assert scene.schedule(A, cached=80) == 0
    (said,) = scene.step()
    assert isinstance(said, LocalPrefill)
    assert said.num_local_tokens == 1
    assert take_counts() == {}


def test_what_a_step_has_taken_counts_against_the_next_request_of_that_step_alone() -> None:
    scene = Scene(32)
    scene.add(A, 20)
    scene.add(B, 20)
    assert [scene.schedule(A), scene.schedule(B)] == [0, 20]
    assert [type(said) for said in scene.step()] == [LocalPrefill, Reservation]
    third = RequestId("c")
    scene.add(third, 20)
    assert scene.schedule(third) == 0


def test_what_vllm_asked_about_and_did_not_allocate_takes_nothing_of_the_step() -> None:
    scene = Scene(32)
    scene.add(A, 20)
    scene.add(B, 20)
    assert scene.scheduler.external_tokens(A, 0) == 0
    assert scene.schedule(B) == 0
    assert [said.transfer_id for said in scene.step()] == ["t-b"]


def test_each_look_decides_anew_by_what_is_cached_then() -> None:
    """The cache may lose blocks while the request waits for room."""
    scene = Scene(32)
    scene.add(A, 100)
    assert scene.scheduler.external_tokens(A, 80) == 0
    assert scene.schedule(A, cached=16) == 84
    assert isinstance(scene.step()[0], Reservation)


def test_a_preempted_local_request_stays_local() -> None:
    scene = Scene(32)
    scene.add(A, 100)
    scene.schedule(A, cached=80)
    scene.step()
    take_counts()
    assert scene.schedule(A, cached=0) == 0
    assert scene.step() == []
    assert take_counts() == {}


@pytest.mark.parametrize("missing", [2, 31])
def test_a_verification_is_pushed_whatever_it_lacks(missing: int) -> None:
    scene = Scene(8192)
    scene.add(A, 80 + missing, wants_receipt=True)
    assert scene.schedule(A, cached=80) == missing
    assert isinstance(scene.step()[0], Reservation)


def test_what_must_fail_fails_however_short_it_is() -> None:
    """It would hide that two secrets differ until a long prompt comes."""
    scene = Scene(8192)
    scene.add(A, 20, token="another cluster's")
    assert scene.schedule(A) == 20
    step = scene.scheduler.step()
    assert [cancel.request_id for cancel in step.cancels] == [A]
    scene.add(B, 20, transfer="t-c")
    scene.schedule(B)
    scene.add(RequestId("second"), 20, transfer="t-c")
    assert scene.schedule(RequestId("second")) == 20


def test_no_answer_of_the_router_ends_a_local_request() -> None:
    scene = Scene(32)
    scene.add(A, 20)
    scene.schedule(A)
    scene.step()
    scene.outcomes.append((A, failed("metaserver unreachable")))
    assert scene.scheduler.step() == DecodeStep()
    assert scene.scheduler.finish(A) is None
    assert scene.cut == []


def test_a_prompt_without_token_ids_is_local_and_says_nothing() -> None:
    """As one of embeddings, which the router sends without transfer parameters."""
    scene = Scene(32)
    scene.add(A, 0)
    assert scene.schedule(A) == 0
    assert scene.step() == []


def test_a_local_request_that_ends_before_its_step_tells_nobody() -> None:
    scene = Scene(32)
    scene.add(A, 20)
    scene.schedule(A)
    scene.scheduler.finish(A)
    assert scene.step() == []
