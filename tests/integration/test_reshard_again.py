"""Resharded KV that arrived wrong is pushed once more, straight from prefill's blocks and without its other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fakes.transports import Wrapped, wrap_transports
from integration.reshard_cache import CELL_BYTES, KV_HEADS
from integration.reshard_pushes import Job
from integration.slow_resharding import SlowGroup, slow_group
from patience import until
from pdcluster_connector.failures import take_counts
from pdcluster_connector.transport.base import Transport, WriteId, WriteRange
from pdcluster_protocol.params import ContentCheck

TOKENS = 100
LARGEST_STRIP = KV_HEADS * max(CELL_BYTES)
STEP = min(CELL_BYTES)


class Astray(Wrapped):
    """Every write of more than ``largest`` bytes is of what stands a head's V further: right counts, wrong bytes."""

    def __init__(self, inner: Transport, largest: int) -> None:
        super().__init__(inner)
        self._largest = largest

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        return super().submit_writes(session, [self._turned(*it) for it in ranges])

    def _turned(self, source: int, target: int, num_bytes: int) -> WriteRange:
        if num_bytes <= self._largest:
            return source, target, num_bytes
        return source + STEP, target, num_bytes - STEP


def push(group: SlowGroup, check: ContentCheck, largest: int) -> Job:
    """A request of which what is larger than ``largest`` bytes goes astray."""
    for rank in group.ranks:
        wrap_transports(rank.prefill.worker, lambda inner: Astray(inner, largest))
    take_counts()
    job = group.add("a", TOKENS, check=check)
    group.forward(a=TOKENS)
    return job


def require_freed(group: SlowGroup) -> None:
    """Prefill gives the request's blocks back, and the staging memory."""
    for rank in group.ranks:
        is_freed = rank.frees("a")
        assert is_freed or until(rank.frees)
        assert rank.staging.is_idle


@pytest.mark.parametrize("check", [ContentCheck.FULL, ContentCheck.SAMPLED])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (4, 2), (2, 4)])
def test_what_was_staged_wrong_is_pushed_again_from_its_blocks(
    prefill_tp: int, decode_tp: int, check: ContentCheck
) -> None:
    with slow_group(prefill_tp, decode_tp, is_held=False, compares=True) as group:
        job = push(group, check, LARGEST_STRIP)
        assert until(lambda: group.has_ended_well(job))
        assert not group.decode.losses
        assert take_counts()["content_differs"] == decode_tp
        require_freed(group)


def test_what_goes_astray_again_is_lost_with_one_error_and_never_received() -> None:
    with slow_group(2, 1, is_held=False, compares=True) as group:
        job = push(group, ContentCheck.FULL, STEP)
        assert until(lambda: group.has_ended(job))
        assert group.decode.outcomes("a") == {False}
        ((_, _, reason),) = group.decode.losses
        assert "the content is not what was pushed" in reason
        assert reason.endswith(", pushed twice")
        require_freed(group)
