"""Every number of every message, one after the other, takes the values that break arithmetic somewhere.

A peer that says one is refused where its words are read, or answered: no thread of ours ends, or skips a turn, over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final, get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drawn import drawn
from fuzz.frames import BOOT, LAYOUT, MEMBER, OURS, PRINT, VALID, A, T, hear, new_reception
from pdcluster_connector.core.clock import deadline_after
from pdcluster_connector.core.content import cells_of, parts_pushed
from pdcluster_connector.core.link import require_possible
from pdcluster_connector.core.ranges import GroupSlice
from pdcluster_connector.core.sending import Push, PushKey
from pdcluster_connector.core.tp_mapping import target_ranks
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.device import CpuDevice
from pdcluster_connector.reshard.feeds import TokenPages, TokenShape
from pdcluster_connector.reshard.rounds import GroupRank, plan_rounds
from pdcluster_connector.scheduler.prefill import PrefillEngine, PrefillScheduler, Scheduled
from pdcluster_connector.settings import PushTiming
from pdcluster_connector.steps import PushSlice, PushTarget
from pdcluster_connector.transport.base import WriteId, WriteRange, WriteStatus
from pdcluster_connector.worker.orders import LayerSaved
from pdcluster_connector.worker.pushes import LivePush
from pdcluster_connector.worker.resharding import plan_item
from pdcluster_connector.worker.route import StepPlan, plan_route
from pdcluster_connector.worker.writes import WriteQueue
from pdcluster_protocol.bounds import bounds_of
from pdcluster_protocol.errors import PDClusterError, ProtocolError
from pdcluster_protocol.ids import BootId, EngineId, RequestId
from pdcluster_protocol.metaserver import PrefillOutcome
from pdcluster_protocol.params import (
    DecodeParams,
    LocalPrefill,
    Reservation,
    SideChannelAddress,
    parse_decode_params,
    sealed,
)
from pdcluster_protocol.prompt_digest import digest_prompt
from pdcluster_protocol.side_channel import (
    Grant,
    Hello,
    RankLayout,
    RegionKind,
    RegionLayout,
    ToDecode,
    ToPrefill,
    Welcome,
    encode_frame,
    parse_to_prefill,
    seal_connection,
)

POWERS: Final = (20, 31, 40, 62, 63, 64)
ODD: Final = sorted({0, 3, -1, *(-(1 << power) for power in (31, 63)), *((1 << p) - d for p in POWERS for d in (0, 1))})
SEAL: Final = seal_connection(OURS, BOOT, MEMBER)
TOKENS: Final = list(range(40))
HELLO: Final = Hello(EngineId("p"), BootId("prefill life"), LAYOUT, PRINT)
TOKEN_MAJOR: Final = RegionLayout("layer", 0, 4096, 8, 2048, 2048, RegionKind.TOKENS, 2)
WELCOMES: Final = {
    "heads": Welcome(EngineId("d"), BOOT, "session", LAYOUT),
    "two stages": Welcome(EngineId("d"), BOOT, "session", RankLayout(0, 1, LAYOUT.regions, 0, 2)),
    "tokens": Welcome(EngineId("d"), BOOT, "session", RankLayout(0, 1, (TOKEN_MAJOR,))),
}
HALF: Final = RankLayout(0, 2, (msgspec.structs.replace(TOKEN_MAJOR, page_stride=1024, page_bytes=1024),))
"""A rank of prefill that holds one of the two heads."""
RESERVATION: Final = Reservation(
    request_id="r",
    remote_block_ids=((1, 2, 3),),
    remote_block_size=16,
    remote_engine_id=EngineId("d"),
    remote_host="h",
    remote_port=1,
    remote_block_sizes=(16,),
    remote_page_sizes=(16,),
    remote_tp_size=1,
    remote_cached_tokens=0,
    transfer_id=T,
    attempt=A,
    deadline_ms=1000,
    remote_boot_id=BOOT,
    remote_side_channels=(SideChannelAddress("h", 1, BOOT),),
    num_prompt_tokens=len(TOKENS),
    prompt_digest=digest_prompt(TOKENS),
)


def numbers(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where numbers are in a message as it goes over the wire."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for name, part in parts:
        if isinstance(part, int) and not isinstance(part, bool):
            yield (*path, name)
        else:
            yield from numbers(part, (*path, name))


def changed(value: Any, path: tuple[Any, ...], number: int) -> Any:
    """``value`` with ``number`` at ``path``."""
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], number) if path[1:] else number
    return copy


def odd_versions(message: object) -> Iterator[tuple[str, Any]]:
    """(what is odd, the message) for each number and each odd value."""
    wire = msgspec.to_builtins(message)
    for path in numbers(wire):
        for number in ODD:
            yield f"{path} = {number}", changed(wire, path, number)


def frame(fields: object) -> bytes | None:
    try:
        return SEAL.close(msgspec.msgpack.encode(fields))
    except OverflowError:
        return None  # Beyond 64 bits there is no such number on the wire.


class Memory:
    """A transport whose addresses are of 64 bits, as those of Mooncake's binding are."""

    session = "ours"
    is_open = True
    writes_per_submit = 1

    def register(self, address: int, num_bytes: int) -> None: ...

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        if min(chain(*ranges)) < 0:
            raise TypeError(f"write(): incompatible arguments {ranges}")
        return WriteId(1)

    def write_status(self, write: WriteId) -> WriteStatus:
        return WriteStatus.PENDING

    def close(self) -> None: ...


def push_along(welcome: Welcome, hello: Hello) -> None:
    """What a lane does when this welcome has come: one push of two blocks, up to its writes and its sums."""
    route = plan_route(welcome, BOOT, hello, can_reshard=True)
    live = LivePush(Push(PushKey(T, A), hold_s=1.0, deadline=9.0), RequestId("r"), "", 32, 0.0)
    live.push.grant(9.0, now=0.0)
    groups, target = (GroupSlice(0, 32, (1, 2), (3, 4)),), PushTarget(EngineId("d"), 1, (), 1, (16,), (16,))
    part = PushSlice(RequestId("r"), T, A, "", target, groups, num_prompt_tokens=32, is_last=True)
    plan, queue = StepPlan(1), WriteQueue(Memory(), CpuDevice(), "session", frozenset())
    plan.add(route, live, part, now=0.0)
    for batch in plan.batches(route, LayerSaved(1, range(len(hello.layout.regions)), None, 0.0)):
        queue.add(batch)
    list(queue.advance(now=1.0))
    for part_summed in parts_pushed(hello.layout, welcome.layout):
        cells_of(part_summed, hello.layout.regions[part_summed.region], ((0, 32),), (1, 2))


@pytest.mark.parametrize("welcome", WELCOMES.values(), ids=WELCOMES)
def test_a_lane_refuses_each_odd_welcome_or_can_push_to_it(welcome: Welcome) -> None:
    hello = msgspec.structs.replace(HELLO, layout=HALF if welcome is WELCOMES["tokens"] else welcome.layout)
    push_along(welcome, hello)
    broken = []
    for what, fields in odd_versions(welcome):
        try:
            said = parse_to_prefill(frame(fields) or b"", SEAL)
            assert isinstance(said, Welcome)
            push_along(said, hello)
        except PDClusterError:
            continue
        except Exception as error:  # noqa: BLE001  # each of them would fail a lane without its reason
            broken.append(f"{what}: {error!r}")
    assert broken == []


def test_a_lane_takes_each_odd_lease_for_what_it_is() -> None:
    for what, fields in odd_versions(Grant(T, A, 9000)):
        try:
            said = parse_to_prefill(frame(fields) or b"", SEAL)
        except ProtocolError:
            continue
        assert isinstance(said, Grant), what
        assert 1 <= said.lease_ms < 1 << 40, what


@pytest.mark.parametrize("message", VALID, ids=lambda message: type(message).__name__)
def test_decode_answers_each_odd_message_or_refuses_it(message: Any) -> None:
    broken = []
    for what, fields in odd_versions(message):
        reception, sent = new_reception(), frame(fields)
        if fields["type"] != "hello":
            hear(reception, MEMBER, frame(msgspec.to_builtins(HELLO)) or b"", 1.0)
        if fields["type"] in ("progress", "done", "failed", "fenced"):
            hear(reception, MEMBER, frame(msgspec.to_builtins(VALID[1])) or b"", 1.0)
        try:
            for each in (sent, frame(msgspec.to_builtins(VALID[1]))):
                hear(reception, MEMBER, each or b"", 2.0)
            list(reception.expire(now=3.0))
        except Exception as error:  # noqa: BLE001  # each of them would lose the receiver's turn
            broken.append(f"{what}: {error!r}")
    assert broken == []


def as_decode_says_it(fields: dict[str, Any]) -> dict[str, Any]:
    """Sealed; one that cannot be read is refused before its seal is looked at."""
    try:
        return {**fields, "seal": sealed(msgspec.convert(fields, Reservation), OURS).seal}
    except msgspec.ValidationError:
        return fields


def plan_push(fields: dict[str, Any]) -> int:
    """What the scheduler, the forward thread, the resharder and a lane of prefill do with this reservation; returns
    how many slices they push."""
    groups = (KvGroup(16),)
    scheduler = PrefillScheduler(PrefillEngine(2, (2,), groups), PushTiming.LAYERWISE, OURS, BootId("life"))
    scheduler.add(RequestId("r"), as_decode_says_it(fields), TOKENS, now=0.0)
    shape = TokenShape(2, 8, TokenPages(16, 1, 8, 128, 128))
    slices = scheduler.step([Scheduled(RequestId("r"), 40)], (), lambda _: ([5, 6, 7],), now=0.5).slices
    for part in slices:
        deadline_after(part.target.deadline_ms, now=0.0)
        for rank in range(2):
            for decode_rank in target_ranks(rank, 2, part.target.tp_size, part.target.num_stages, (2,), has_state=True):
                assert part.target.side_channels[decode_rank].port in range(1, 1 << 16)
            item = plan_item(part, 0, shape.pages)
            plan_rounds(GroupRank(rank, 2), (shape,), [item] if item else [], 1 << 20)
    return len(slices)


def test_prefill_pushes_for_each_odd_reservation_or_says_why_not() -> None:
    valid = msgspec.structs.replace(RESERVATION, token=OURS.mint(T, A, 1000))
    assert plan_push(msgspec.to_builtins(valid)) == 1
    broken = []
    for what, fields in odd_versions(RESERVATION):
        try:
            fields["token"] = OURS.mint(T, fields["attempt"], fields["deadline_ms"])
            plan_push(fields)
        except Exception as error:  # noqa: BLE001  # each of them would end the engine
            broken.append(f"{what}: {error!r}")
    assert broken == []


def test_decode_takes_each_odd_order_of_the_router_for_what_it_is() -> None:
    params = DecodeParams(metaserver="http://r", transfer_id=T, deadline_ms=1000)
    for what, fields in odd_versions(params):
        try:
            said = parse_decode_params(fields)
        except ProtocolError:
            continue
        assert said.attempt >= 1, what
        assert 1 <= said.deadline_ms < 1 << 40, what


def kinds_within(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """``kind``, if it is a message, and every kind of message that it may hold."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from kinds_within(field.type)
    for argument in get_args(kind):
        yield from kinds_within(argument)


def is_number(annotation: Any) -> bool:
    bare = getattr(annotation, "__supertype__", annotation)
    return bare is int or any(map(is_number, get_args(annotation)))


@pytest.mark.parametrize(
    "kind", [ToDecode, ToPrefill, DecodeParams, Reservation, LocalPrefill, PrefillOutcome], ids=str
)
def test_every_number_of_a_message_says_its_bounds(kind: Any) -> None:
    bare = {
        f"{holder.__name__}.{field.name}"
        for holder in kinds_within(kind)
        for field in msgspec.structs.fields(holder)
        if is_number(field.type) and bounds_of(field.type) is None
    }
    assert bare <= {"DecodeParams.version", "Reservation.version", "LocalPrefill.version"}


def test_a_number_out_of_bounds_is_refused_by_name() -> None:
    page_of_none = RankLayout(0, 1, (msgspec.structs.replace(TOKEN_MAJOR, page_tokens=0),))
    sent = encode_frame(msgspec.structs.replace(WELCOMES["tokens"], layout=page_of_none), SEAL)
    with pytest.raises(ProtocolError) as refused:
        parse_to_prefill(sent, SEAL)
    assert str(refused.value) == (
        "side-channel frame is not a known message: welcome of engine d: layout.regions[0].page_tokens is 0, and must "
        "be in [1, 2147483648]: run the same pdcluster everywhere"
    )


@pytest.mark.parametrize(
    ("numbers_said", "reason"),
    [
        ({"tp_rank": 2}, "says rank 2 of TP 2 in stage 0 of 1"),
        ({"stage": 1}, "says rank 0 of TP 2 in stage 1 of 1"),
        (
            {"page_bytes": 2048},
            "has pages of 2048 bytes with a stride of 1024 bytes in layer layer: the stride must be 2048 or more",
        ),
        ({"page_stride": 1 << 61}, "says that layer layer ends at address 16140901064495862784"),
    ],
)
def test_numbers_that_cannot_be_true_together_are_refused(numbers_said: dict[str, int], reason: str) -> None:
    of_region = {name: number for name, number in numbers_said.items() if name.startswith("page")}
    of_rank = {name: number for name, number in numbers_said.items() if name not in of_region}
    region = msgspec.structs.replace(HALF.regions[0], **of_region)
    with pytest.raises(ProtocolError, match=f"decode engine d {reason}"):
        require_possible(msgspec.structs.replace(HALF, regions=(region,), **of_rank), "decode engine d")


SIZES: Final = (1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 128)
NUM_PUSHED: Final[list[int]] = []
"""By each plausible reservation of the test below."""


@st.composite
def plausible(draw: st.DrawFn) -> tuple[int, int, int, list[int], int]:
    """Block, page, cached tokens, blocks, TP: of each number most draws fit the others, so all of them often do."""
    block = draw(st.sampled_from(SIZES))
    fitting = [size for size in SIZES if block % size == 0]
    page = draw(st.sampled_from([*fitting * 3, *SIZES]))
    cached = draw(st.integers(0, 41) if draw(st.integers(0, 3)) == 0 else st.integers(0, 3).map(block.__mul__))
    num_blocks = -(-len(TOKENS) // block)
    blocks = draw(st.lists(st.integers(0, 9), min_size=draw(st.sampled_from([1, *[num_blocks] * 3])), max_size=42))
    return block, page, cached, blocks, draw(st.sampled_from([1, 2, 4, 1, 2, 3, 5]))


def test_what_prefill_takes_never_fails_the_step_of_others() -> None:
    NUM_PUSHED.clear()
    check_plausible()
    assert sum(map(bool, NUM_PUSHED)) >= 4  # The four that fit together. Of those drawn, mostly some more.


@settings(max_examples=drawn(300))
@given(plausible())
@example((16, 16, 0, [1, 2, 3], 1))
@example((16, 4, 16, [5, 6, 7], 2))
@example((8, 2, 24, [1, 2, 3, 4, 5], 4))
@example((64, 64, 0, [9], 2))
def check_plausible(numbers_said: tuple[int, int, int, list[int], int]) -> None:
    """Plausible numbers that do not fit together: the resharder plans all requests of a step in one."""
    block, page, cached, blocks, tp_size = numbers_said
    channels = tuple(SideChannelAddress("h", 1 + rank, BOOT) for rank in range(tp_size))
    odd = msgspec.structs.replace(
        RESERVATION,
        remote_block_ids=(tuple(blocks),),
        remote_block_size=block,
        remote_block_sizes=(block,),
        remote_page_sizes=(page,),
        remote_cached_tokens=cached,
        remote_tp_size=tp_size,
        remote_side_channels=channels,
        token=OURS.mint(T, A, 1000),
    )
    NUM_PUSHED.append(plan_push(msgspec.to_builtins(odd)))
