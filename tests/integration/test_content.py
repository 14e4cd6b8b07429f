"""Content is compared on both engines: what counts cannot see is found out. Real ranks and Mooncake."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

import msgspec
import pytest
import torch

from fakes.transports import Permuting, wrap_transports
from integration.ranks import BLOCK_SIZE, HEAD_BYTES, Pair, Shape, content_of, expect, make_pair
from patience import HANGS_S, until
from pdcluster_connector.device import CpuDevice, Stream
from pdcluster_connector.engine_facts import Memory
from pdcluster_connector.failures import take_counts
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import DecodeStep, PushSlice
from pdcluster_connector.worker.content_loop import compiled_loop
from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import ContentCheck

OURS, THEIRS = [3, 4, 5, 9], [8, 9, 2, 30]
ROW: Final = BLOCK_SIZE * HEAD_BYTES
"""Bytes of one head in a block; a block has two."""


def breaks_by(pair: Pair, piece_bytes: int, place_of: Callable[[int], int]) -> None:
    """Prefill writes pieces of each layer in other places than it plans."""
    begin = pair.target.layers.ctypes.data
    wrap_transports(pair.prefill.worker, lambda inner: Permuting(inner, begin, piece_bytes, place_of))


def turned(cell: int) -> int:
    """[heads][tokens] of a block as [tokens][heads]."""
    block, inside = divmod(cell, 2 * BLOCK_SIZE)
    head, token = divmod(inside, BLOCK_SIZE)
    return block * 2 * BLOCK_SIZE + token * 2 + head


Changes: TypeAlias = dict[Role, Callable[[Memory], Memory]]
NO_VIEWS: Final[Changes] = dict.fromkeys(Role, partial(replace, views=()))

FAULTS: Final[dict[str, tuple[int, Callable[[int], int]]]] = {
    "two heads": (ROW, lambda row: row ^ 1),
    "two blocks": (2 * ROW, lambda block: block ^ 1 if block % 64 in (8, 9) else block),
    "two tokens": (HEAD_BYTES, lambda cell: cell ^ 1),
    "heads and tokens": (HEAD_BYTES, turned),
    "halves of a cell": (HEAD_BYTES // 2, lambda half: half ^ 1),
    "two layers": (2 * ROW, lambda block: block ^ Shape().num_blocks),
}


def test_content_that_arrives_where_it_belongs_is_received() -> None:
    with make_pair() as pair:
        pair.compare("a", OURS, THEIRS)
        pair.require_received("a")
        pair.step(finished=["a"])
        assert pair.step_until(lambda: "a" in pair.released)


@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_changed_places_passes_the_counts_and_not_the_comparison(fault: str) -> None:
    with make_pair() as pair:
        breaks_by(pair, *FAULTS[fault])
        pair.expect("counted", 4)
        pair.forward(pair.slice_of("counted", OURS, THEIRS))
        pair.require_received("counted")  # as many bytes as decode expects
        take_counts()
        pair.compare("compared", OURS, THEIRS)
        pair.require_lost("compared")
        (lost,) = pair.losses
        assert "the content is not what was pushed: layer layers." in lost.reason
        assert lost.reason.endswith(", pushed twice")
        assert take_counts()["content_differs"] == 2
        pair.step(finished=["compared"])
        assert pair.step_until(lambda: "compared" in pair.released), "its source is kept for ever"


def first_time(place_of: Callable[[int], int]) -> Callable[[int], int]:
    """Each piece goes astray once, and then where it belongs."""
    seen: set[int] = set()

    def place(piece: int) -> int:
        if piece in seen:
            return piece
        seen.add(piece)
        return place_of(piece)

    return place


@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_changed_places_once_is_pushed_again_and_then_right(fault: str) -> None:
    piece_bytes, place_of = FAULTS[fault]
    with make_pair() as pair:
        breaks_by(pair, piece_bytes, first_time(place_of))
        take_counts()
        pair.compare("a", OURS, THEIRS)
        pair.require_received("a")
        assert not pair.losses
        assert take_counts()["content_differs"] == 1
        for ours, theirs in zip(OURS, THEIRS, strict=True):
            assert (pair.source.layers[:, ours] == pair.target.layers[:, theirs]).all()
        pair.step(finished=["a"])
        assert pair.step_until(lambda: "a" in pair.released)


def turn_views(memory: Memory) -> Memory:
    """Heads and tokens are read the other way."""
    shape = Shape().num_blocks, BLOCK_SIZE, Shape().kv_heads, HEAD_BYTES
    return replace(memory, views=tuple(view.reshape(shape).transpose(1, 2) for view in memory.views))


def test_tensors_whose_heads_and_tokens_one_side_reads_the_other_way_are_found_out() -> None:
    """As it is with a layout that is misread: every byte goes where the plan says, and means something else."""
    with make_pair(changes={Role.PREFILL: turn_views}) as pair:
        pair.compare("a", OURS, THEIRS)
        pair.require_lost("a")
        assert "the content is not what was pushed" in pair.losses[0].reason


@pytest.mark.parametrize("side", Role)
def test_a_rank_that_cannot_read_its_own_kv_verifies_nothing(side: Role) -> None:
    with make_pair(changes={side: partial(replace, views=())}) as pair:
        pair.compare("a", OURS, THEIRS, deadline_ms=20_000)
        pair.require_lost("a")


def test_a_decode_rank_whose_device_fails_while_it_reads_says_so_and_accuses_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Here a page that there is not. Sums of a part of the content must not be taken for sums of all of it."""
    with make_pair() as pair:
        take_counts()
        expected = expect("a", 4, 120_000, content_of([8, 9, 2, 1 << 20]))
        pair.decode.worker.begin_step(DecodeStep(expects=(expected,)))
        part = pair.slice_of("a", OURS, THEIRS)
        pair.forward(msgspec.structs.replace(part, content=content_of(OURS, THEIRS)))
        pair.require_lost("a")
        assert not pair.losses, "it is no attempt's fault"
        assert "content_differs" not in take_counts()
        assert until(lambda: any("receive_failed" in said for said in caplog.messages)), "its thread says so afterwards"
        (told,) = [said for said in caplog.messages if "receive_failed" in said]
        assert "decode rank cannot read its own KV" in told
        pair.step(finished=["a"])
        assert pair.step_until(lambda: "a" in pair.released), "its source is kept for ever"


def forward_unreadable(pair: Pair, name: str, *others: PushSlice) -> None:
    """One forward pass with a request that prefill's device fails to sum up: a page of its content is not there."""
    expected = expect(name, 4, 120_000, content_of(THEIRS))
    pair.decode.worker.begin_step(DecodeStep(expects=(expected,)))
    order = content_of([3, 4, 5, 1 << 20], THEIRS)
    pair.forward(msgspec.structs.replace(pair.slice_of(name, OURS, THEIRS), content=order), *others)


def test_a_prefill_rank_whose_device_fails_at_one_requests_sums_loses_that_one_and_goes_on_with_the_lane() -> None:
    """Another request is under way through the same lane meanwhile, and ends as if nothing had been."""
    with make_pair() as pair:
        take_counts()
        content = content_of([11, 12], [13, 14])
        pair.decode.worker.begin_step(DecodeStep(expects=(expect("other", 2, 120_000, content_of([13, 14])),)))
        forward_unreadable(pair, "broken", pair.slice_of("other", [11], [13], is_last=False))
        pair.require_lost("broken")
        (lost,) = pair.losses
        assert "prefill rank cannot read its own KV, so that its content cannot be compared: " in lost.reason
        pair.forward(msgspec.structs.replace(pair.slice_of("other", [12], [14]), content=content))
        pair.require_received("other")
        pair.step(finished=["broken", "other"])
        assert pair.step_until(lambda: {"broken", "other"} <= pair.released), "a source is kept for ever"
        counts = take_counts()
        assert counts["push_failed"] == 1
        assert "lane_failed" not in counts
        assert "content_differs" not in counts, "sums of a part were taken for sums of all"


class DeviceWithoutStreams(CpuDevice):
    """Opens no stream, as a device that has no memory left."""

    def open_stream(self, device: torch.device) -> Stream:
        raise RuntimeError(f"{device}: out of memory")


def test_a_prefill_rank_that_cannot_begin_its_sums_loses_what_is_compared_and_nothing_else() -> None:
    with make_pair(devices={Role.PREFILL: DeviceWithoutStreams()}) as pair:
        take_counts()
        pair.compare("compared", OURS, THEIRS)
        pair.require_lost("compared")
        assert pair.losses[0].reason.endswith("cpu: out of memory")
        pair.expect("counted", 4)
        pair.forward(pair.slice_of("counted", OURS, THEIRS))
        pair.require_received("counted")
        assert "lane_failed" not in take_counts()


def test_a_decode_rank_that_cannot_begin_its_sums_loses_what_is_compared_and_nothing_else() -> None:
    with make_pair(devices={Role.DECODE: DeviceWithoutStreams()}) as pair:
        take_counts()
        pair.compare("compared", OURS, THEIRS, deadline_ms=int(1000 * HANGS_S))
        pair.require_lost("compared")
        assert not pair.losses, "it is no attempt's fault"
        pair.expect("counted", 4)
        pair.forward(pair.slice_of("counted", OURS, THEIRS))
        pair.require_received("counted")


class DeviceThatBarsTheReceiver(CpuDevice):
    """As a device that tells its first caller of what went wrong before."""

    def enter_thread(self) -> None:
        if threading.current_thread().name == "pdcluster-receiver":
            raise RuntimeError("an illegal memory access was encountered")


def test_a_decode_rank_whose_thread_cannot_enter_its_device_still_ends_every_wait() -> None:
    with make_pair(devices={Role.DECODE: DeviceThatBarsTheReceiver()}) as pair:
        pair.expect("counted", 4)
        pair.forward(pair.slice_of("counted", OURS, THEIRS))
        pair.require_received("counted")
        pair.expect("cancelled", 4)
        pair.cancel("cancelled")
        pair.require_lost("cancelled")


class DeviceThatBarsTheReceiverOnce(DeviceThatBarsTheReceiver):
    """As a device that tells of each error once."""

    def __init__(self) -> None:
        self.has_barred = self.has_let_in = False

    def enter_thread(self) -> None:
        if threading.current_thread().name != "pdcluster-receiver":
            return
        if not self.has_barred:
            self.has_barred = True
            super().enter_thread()
        self.has_let_in = True


def test_a_decode_rank_whose_thread_could_not_enter_its_device_tries_again() -> None:
    device = DeviceThatBarsTheReceiverOnce()
    with make_pair(devices={Role.DECODE: device}) as pair:
        pair.expect("counted", 4)
        assert until(lambda: device.has_let_in), "its sums would be for another device"


@pytest.mark.parametrize(
    ("check", "changes", "num_compiled"),
    [
        (ContentCheck.FULL, {}, 1),
        (ContentCheck.FULL, NO_VIEWS, 0),
        (ContentCheck.SAMPLED, {}, 0),
        (ContentCheck.OFF, {}, 0),
    ],
)
def test_sums_are_compiled_when_ranks_that_are_to_find_all_start_and_nowhere_else(
    check: ContentCheck, changes: Changes, num_compiled: int
) -> None:
    """It takes seconds, which the first request must not wait for, and which samples do not give back."""
    compiled_loop.cache_clear()
    with make_pair(settings=Settings(content_check=check), changes=changes) as pair:
        assert compiled_loop.cache_info().currsize == num_compiled
        pair.compare("a", OURS, THEIRS)
        if not changes:
            pair.require_received("a")
        assert compiled_loop.cache_info().currsize == num_compiled
