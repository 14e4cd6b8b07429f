"""The resharder's work is a device's too: it is behind the forward pass, before the lanes, and beside the host."""

from __future__ import annotations

import threading
from functools import partial

import msgspec

from fakes.streams import AsyncStream
from integration.reshard_cache import NUM_LAYERS
from integration.slow_resharding import PATIENT, slow_group
from patience import PATIENCE_S, until
from pdcluster_protocol.ids import RequestId

LAYER = 2
"""Kernels of a layer: K and V."""
MARK = 1
"""The event of a round with an exchange by which the resharder sees its end; the exchange begins behind the first."""
WHILE_NOTHING_MAY_HAPPEN_S = 0.3
"""Too short only lets a broken connector pass."""


def test_a_layer_is_gathered_when_it_is_computed_and_not_before() -> None:
    with slow_group(1, 2) as group:
        (rank,) = group.ranks
        job = group.add("a", 100)
        group.forward(a=100)
        for layer in range(NUM_LAYERS):
            assert rank.forward.is_awaited(layer, partial(has_more, rank.side, rank.side.num_given))
            rank.forward.let(LAYER)
            assert group.arrives(job, layer)
        assert until(lambda: group.has_ended_well(job))


def test_the_resharder_works_beside_the_forward_pass_and_never_in_its_stream() -> None:
    """The next layer takes long: what was gathered behind it would come late, and be handed on before."""
    with slow_group(2, 1) as group:
        job = group.add("a", 100)
        group.forward(a=100)
        for rank in group.ranks:
            rank.forward.let(LAYER)
        assert group.arrives(job, 0)
        for rank in group.ranks:
            rank.forward.release()
        assert group.arrives(job, 1, 2)
        assert until(lambda: group.has_ended_well(job))


def test_staging_is_handed_on_when_the_side_stream_is_through_with_it() -> None:
    """A lane would read what is not there yet."""
    with slow_group(1, 2, is_held=False) as group:
        (rank,) = group.ranks
        rank.side.hold()
        job = group.add("a", 100)
        group.forward(a=100)
        assert rank.side.is_awaited(0, lambda: not group.has_nothing(job))
        rank.side.release()
        assert group.arrives(job, *range(NUM_LAYERS))
        assert until(lambda: group.has_ended_well(job))


def test_what_other_ranks_send_is_placed_when_it_has_come() -> None:
    with slow_group(2, 1, is_held=False) as group:
        late = group.ranks[0]
        late.exchange.hold()
        job = group.add("a", 100)
        group.forward(a=100)
        assert late.side.is_awaited(MARK, lambda: not group.has_nothing(job))
        late.exchange.release()
        assert group.arrives(job, *range(NUM_LAYERS))
        assert until(lambda: group.has_ended_well(job))


def test_staging_memory_is_used_again_when_the_writes_that_read_it_have_ended() -> None:
    """The transport reads a room as late as it may: the layers after it must not be there by then."""
    small = msgspec.structs.replace(PATIENT, staging_bytes=24 << 10)
    with slow_group(1, 2, small, is_held=False) as group:
        (rank,) = group.ranks
        rank.wire.is_holding = True
        job = group.add("a", 150)
        group.forward(a=150)
        assert until(lambda: rank.staging.is_wanted or rank.prefill.worker._resharding.read_step > 0)
        rank.wire.is_holding = False
        assert group.arrives(job, *range(NUM_LAYERS))
        assert until(lambda: group.has_ended_well(job))


def test_blocks_are_kept_until_the_side_stream_has_read_them_although_their_push_has_ended() -> None:
    """The other ranks need what it reads."""
    with slow_group(1, 2, is_held=False) as group:
        (rank,) = group.ranks
        rank.side.hold()
        job = group.add("a", 100)
        group.forward(a=100)
        group.decode.cancel("a")
        assert until(lambda: group.has_ended(job))
        assert not rank.frees("a")
        assert rank.side.is_awaited(0, rank.frees)
        rank.side.release()
        assert until(rank.frees)


def test_blocks_that_are_taken_away_are_not_overwritten_before_the_side_stream_has_read_them() -> None:
    """No lane reads them, so that only the resharder can tell."""
    with slow_group(1, 2, is_held=False) as group:
        (rank,) = group.ranks
        rank.side.hold()
        job = group.add("a", 100)
        group.forward(a=100)
        assert rank.side.is_awaited(0, lambda: not group.has_nothing(job))
        rank.wait_until_lanes_are_quiet(job)
        taken = threading.Thread(target=rank.prefill.worker.protect_preempted, args=([RequestId("a")],))
        taken.start()
        taken.join(WHILE_NOTHING_MAY_HAPPEN_S)
        assert taken.is_alive()
        rank.side.release()
        taken.join(PATIENCE_S)
        assert not taken.is_alive()
        assert until(lambda: group.has_ended_well(job))


def has_more(stream: AsyncStream, num_given: int) -> bool:
    return stream.num_given > num_given
