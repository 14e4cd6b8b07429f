"""A prefill rank pushes small strips into decode ranks of a larger TP: real side channel and Mooncake, every byte."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pytest

from fakes.async_device import AsyncRuntime, async_device
from fakes.transports import Failing, Late, Wire, Wrapped, wrap_transports
from integration.ranks import (
    BLOCK_SIZE,
    HEAD_BYTES,
    LIFE,
    SECRET,
    Cache,
    Shape,
    blocks_slice,
    content_of,
    engine_facts,
    expect,
    fingerprint_of,
    forward,
    stepped_until,
)
from patience import EDGE_S, until
from pdcluster_cli.local.report import read_traces
from pdcluster_connector.assembly import DecodeRank, PrefillRank, make_decode_rank, make_prefill_rank
from pdcluster_connector.core.reception import Lost
from pdcluster_connector.device import Device
from pdcluster_connector.ending import end_parts
from pdcluster_connector.engine_facts import Memory
from pdcluster_connector.failures import take_counts
from pdcluster_connector.reshard import StripStaging
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import Cancel, ContentOrder, DecodeStep, PrefillStep, PushSlice, PushTarget
from pdcluster_connector.transport.base import Transport, WriteId, WriteRange, WriteStatus
from pdcluster_protocol.ids import Attempt, EngineId, RequestId, TransferId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.side_channel import RankLayout
from pdcluster_protocol.trace import PushTrace

MODEL: Final = Shape(num_layers=3, num_blocks=1600, kv_heads=8)
QUICK: Final = Settings(quarantine_s=0.5, hold_s=0.5, lease_s=20.0, handshake_timeout_s=20.0)
PATIENT: Final = Settings(quarantine_s=0.5, hold_s=EDGE_S, lease_s=EDGE_S, handshake_timeout_s=EDGE_S)


def share_of(cache: Cache, tp_rank: int, tp_size: int) -> Memory:
    """``cache`` holds the rank's share of the model's heads."""
    memory = cache.memory(fingerprint_of(MODEL))
    regions = tuple(msgspec.structs.replace(region, heads=MODEL.kv_heads) for region in memory.layout.regions)
    return replace(memory, layout=RankLayout(tp_rank, tp_size, regions))


@dataclass
class Engines:
    """One prefill rank that holds the heads ``heads``, and every decode rank that it writes to."""

    source: Cache
    prefill: PrefillRank
    targets: list[Cache]
    decodes: list[DecodeRank]
    tp_size: int
    ended: dict[tuple[str, int], bool] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)

    @property
    def strips(self) -> StripStaging:
        strips = self.prefill.worker._context.strips
        assert strips is not None
        return strips

    def push(
        self, name: str, ours: Sequence[int], theirs: Sequence[int], *, is_last: bool = True, is_compared: bool = False
    ) -> None:
        """One forward pass completes the blocks ``ours``."""
        addresses = tuple(rank.address for rank in self.decodes)
        target = PushTarget(EngineId("decode"), self.tp_size, addresses, 120_000)
        token = SECRET.mint(TransferId(name), Attempt(1), 120_000)
        request = RequestId(name), TransferId(name), Attempt(1)
        part = PushSlice(
            *request, token, target, blocks_slice(ours, theirs), num_prompt_tokens=99, is_last=is_last,
            content=content_of(ours, theirs) if is_compared else None,
        )  # fmt: skip
        forward(self.prefill.worker, MODEL, PrefillStep(LIFE, (part,)))

    def expect(self, name: str, num_blocks: int, content: ContentOrder | None = None) -> None:
        for rank in self.decodes:
            rank.worker.begin_step(DecodeStep(expects=(expect(name, num_blocks, 120_000, content),)))

    def step(self, finished: Sequence[str] = ()) -> None:
        self.released |= self.prefill.worker.finished(map(RequestId, finished))
        for number, rank in enumerate(self.decodes):
            receipts = rank.worker.receipts()
            self.ended |= {(name, number): name not in receipts.failed for name in receipts.ended}
            for lost in rank.worker.losses():
                cancel = Cancel(lost.request_id, "cancelled by the test")
                rank.worker.begin_step(DecodeStep(cancels=(cancel,)))

    def step_until(self, is_true: Callable[[], bool]) -> bool:
        return stepped_until(self.step, is_true)

    def outcomes(self, name: str) -> list[bool]:
        """Of every decode rank, once all have one."""
        assert self.step_until(lambda: all((name, rank) in self.ended for rank in range(self.tp_size)))
        return [self.ended[name, rank] for rank in range(self.tp_size)]

    def require_exact(self, ours: Sequence[int], theirs: Sequence[int]) -> None:
        """Every decode rank has its heads of the prompt, and nothing else was written."""
        shape = MODEL.num_layers, MODEL.num_blocks, self.source.shape.kv_heads, BLOCK_SIZE * HEAD_BYTES
        model = self.source.layers.reshape(shape)
        for rank, target in enumerate(self.targets):
            count = target.shape.kv_heads
            wanted = np.zeros_like(target.layers)
            heads = model[:, :, rank * count : (rank + 1) * count]
            wanted[:, list(theirs)] = heads[:, list(ours)].reshape(MODEL.num_layers, len(ours), -1)
            assert np.array_equal(target.layers, wanted), f"decode rank {rank}"

    def require_no_staging_taken(self, name: str) -> None:
        self.step(finished=[name])
        assert self.step_until(lambda: name in self.released)
        assert self.step_until(lambda: self.strips.is_idle)


def on_device(memory: Memory, runtime: AsyncRuntime | None) -> Memory:
    """The memory's tensors are the device's."""
    return replace(memory, views=tuple(map(runtime.tensor, memory.views))) if runtime else memory


@contextmanager
def engines(
    tp_size: int, settings: Settings = QUICK, made: tuple[Device, AsyncRuntime] | None = None
) -> Iterator[Engines]:
    """Prefill has TP 1, decode ``tp_size``. ``made``: prefill's device, in place of the CPU."""
    device, runtime = made or (None, None)
    with ExitStack() as stack:
        source = Cache(MODEL)
        source.fill(1)
        targets = [Cache(replace(MODEL, kv_heads=MODEL.kv_heads // tp_size)) for _ in range(tp_size)]
        facts = replace(engine_facts(Role.DECODE, MODEL, settings), tp_size=tp_size)
        decodes = []
        for rank, target in enumerate(targets):
            decodes.append(make_decode_rank(facts, share_of(target, rank, tp_size)))
            stack.callback(end_parts, [decodes[-1]])
        memory = on_device(share_of(source, 0, 1), runtime)
        with runtime.default if runtime else nullcontext():
            prefill = make_prefill_rank(engine_facts(Role.PREFILL, MODEL, settings), memory, device=device)
        stack.callback(end_parts, [prefill])
        yield Engines(source, prefill, targets, decodes, tp_size)


def falling(count: int, first: int) -> list[int]:
    """As a pool has them that was used once: the last block first, and a gap after each hundred."""
    return [first + at + at // 100 for at in range(count)][::-1]


def shuffled(count: int) -> list[int]:
    return [1 + int(block) for block in np.random.default_rng(5).permutation(MODEL.num_blocks - 1)[:count]]


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_every_decode_rank_gets_its_heads_in_few_writes(tp_size: int, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    ours, theirs = shuffled(700), falling(700, 30)
    with engines(tp_size, msgspec.structs.replace(QUICK, trace_file=str(trace))) as pair:
        pair.expect("a", 700)
        pair.push("a", ours[:300], theirs[:300], is_last=False)
        pair.push("a", ours[300:], theirs[300:])
        assert pair.outcomes("a") == [True] * tp_size
        pair.require_exact(ours, theirs)
        pair.require_no_staging_taken("a")
    pushes = [line for line in read_traces([trace]) if isinstance(line, PushTrace)]
    assert {push.ranges for push in pushes} == {3 * 700}
    assert {push.decode_rank for push in pushes} == set(range(tp_size))
    assert max(push.writes for push in pushes) <= 3 * 16


def test_blocks_without_neighbours_leave_as_they_are(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    ours, theirs = shuffled(100), list(range(1, 201, 2))
    with engines(2, msgspec.structs.replace(QUICK, trace_file=str(trace))) as pair:
        pair.expect("a", 100)
        pair.push("a", ours, theirs)
        assert pair.outcomes("a") == [True] * 2
        pair.require_exact(ours, theirs)
    assert {line.writes for line in read_traces([trace]) if isinstance(line, PushTrace)} == {3 * 100}


@pytest.mark.parametrize("lacking", [0, 1])
def test_where_one_lane_cannot_be_made_the_decode_ranks_with_one_hear_it(
    lacking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their engine asks for another attempt at once; to find it out by itself would take it seconds."""
    eventfd, calls = os.eventfd, iter(range(9))

    def one_fails(*arguments: int) -> int:
        if next(calls) == lacking:
            raise OSError(errno.EMFILE, "Too many open files")
        return eventfd(*arguments)

    with engines(2, PATIENT) as pair:
        pair.expect("a", 100)
        with monkeypatch.context() as patch:
            patch.setattr(os, "eventfd", one_fails)
            pair.push("a", range(1, 101), range(1, 101))
        lost: list[Lost] = []

        def hears() -> bool:
            lost.extend(pair.decodes[1 - lacking].worker.losses())
            return bool(lost)

        assert until(hears, EDGE_S)
        assert "prefill has no descriptor or thread for a lane to another decode rank" in lost[0].reason
        pair.require_no_staging_taken("a")
        pair.expect("b", 100)
        pair.push("b", range(1, 101), range(201, 301))
        assert pair.outcomes("b") == [True] * 2


@pytest.mark.parametrize("strip_staging_bytes", [0, 1 << 20])
def test_decode_sees_no_difference_without_space_and_with_little(strip_staging_bytes: int) -> None:
    ours, theirs = shuffled(700), falling(700, 30)
    with engines(4, msgspec.structs.replace(QUICK, strip_staging_bytes=strip_staging_bytes)) as pair:
        pair.expect("a", 700)
        pair.push("a", ours, theirs)
        assert pair.outcomes("a") == [True] * 4
        pair.require_exact(ours, theirs)


class _FailsLater(Failing):
    """Some writes land, those that follow are called failed."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._num_good = 3

    def write_status(self, write: WriteId) -> WriteStatus:
        if self._num_good > 0:
            status = self._inner.write_status(write)
            self._num_good -= status is WriteStatus.DONE
            return status
        return super().write_status(write)


def test_a_push_that_fails_half_way_gives_every_buffer_back_and_the_next_one_arrives() -> None:
    ours, theirs = shuffled(700), falling(700, 30)
    with engines(2) as pair:
        parts = pair.prefill.worker._context
        wrap_transports(pair.prefill.worker, _FailsLater)
        pair.expect("a", 700)
        pair.push("a", ours, theirs)
        assert pair.outcomes("a") == [False] * 2
        pair.require_no_staging_taken("a")
        pair.prefill.worker._context = parts
        pair.expect("b", 700)
        pair.push("b", ours, theirs)
        assert pair.outcomes("b") == [True] * 2
        pair.require_exact(ours, theirs)
        pair.require_no_staging_taken("b")


class _Spoils(Wrapped):
    """The first write takes its bytes from a neighbour's place: what decode compares differs."""

    _has_spoilt = False

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        (source, target, size), *others = ranges
        if not self._has_spoilt:
            self._has_spoilt = True
            return super().submit_writes(session, [(source + HEAD_BYTES, target, size - HEAD_BYTES), *others])
        return super().submit_writes(session, ranges)


def test_content_that_differs_is_pushed_again_straight_from_the_blocks_and_then_right() -> None:
    ours, theirs = shuffled(64), falling(64, 30)
    with engines(2) as pair:
        wrap_transports(pair.prefill.worker, _Spoils)
        take_counts()
        pair.expect("a", 64, content_of(theirs))
        pair.push("a", ours, theirs, is_compared=True)
        assert pair.outcomes("a") == [True] * 2
        assert take_counts()["content_differs"] == 2
        pair.require_exact(ours, theirs)
        pair.require_no_staging_taken("a")


def test_a_preempted_request_is_read_to_its_end_or_called_failed() -> None:
    """Its blocks are overwritten as soon as the engine may: what decode calls whole was read before."""
    ours, theirs = shuffled(700), falling(700, 30)
    with engines(2) as pair:
        pair.expect("a", 700)
        pair.push("a", ours, theirs)
        before = pair.source.layers.copy()
        pair.prefill.worker.protect_preempted([RequestId("a")])
        pair.source.layers[:] = 0xEE
        is_whole = pair.outcomes("a")
        pair.source.layers[:] = before
        if is_whole == [True] * 2:
            pair.require_exact(ours, theirs)
        pair.require_no_staging_taken("a")


def test_strips_are_copied_beside_the_forward_pass_and_leave_when_that_is_over() -> None:
    """The lanes' own streams are held: nothing is written, and the forward pass's stream gets no work of theirs."""
    ours, theirs = shuffled(200), falling(200, 30)
    with async_device() as made, engines(2, PATIENT, made) as pair:
        (_, runtime), wire = made, Wire()
        wrap_transports(pair.prefill.worker, lambda inner: Late(inner, wire))
        pair.expect("a", 100)
        pair.push("a", ours[:100], theirs[:100])
        assert pair.outcomes("a") == [True] * 2
        sides, num_submitted = runtime.streams[1:], wire.num_submitted
        assert len(sides) == 2, "a stream for each lane"
        assert runtime.default.num_given == 0
        for stream in sides:
            stream.hold()
        before = [len(stream.events) for stream in sides]
        pair.expect("b", 100)
        pair.push("b", ours[100:], theirs[100:])
        assert until(lambda: all(len(stream.events) > count for stream, count in zip(sides, before, strict=True)))
        for stream in sides:
            assert stream.is_awaited(len(stream.events) - 1, lambda: wire.num_submitted > num_submitted)
        assert wire.num_submitted == num_submitted
        assert not pair.strips.is_idle
        runtime.release()
        assert pair.outcomes("b") == [True] * 2
        pair.require_exact(ours, theirs)
        pair.require_no_staging_taken("b")
