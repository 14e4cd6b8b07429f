"""What is kept of a reservation once no attempt can follow."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

from fakes.reservations import plain_reservation
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_router.core.requests.dialect import LayerwiseCall, Posted
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.requests.reservation import ReservationCalls

IDS = tuple(range(1000, 8000))
OURS = msgspec.structs.replace(
    plain_reservation(TransferId("t")), remote_block_ids=(IDS, IDS[:7]), remote_block_sizes=(16, 16)
)
THEIRS = LayerwiseCall(
    transfer_id=TransferId("t"), posted=b"[%d]" % 7 * 50_000, num_prompt_tokens=42, remote_cached_tokens=0
)


@pytest.mark.parametrize("posted", [OURS, THEIRS], ids=["ours", "vllm-ascend"])
def test_the_same_reservation_fits_and_no_other_one_when_its_blocks_are_forgotten(posted: Posted) -> None:
    calls = ReservationCalls(lambda: None)
    calls.forget_blocks()
    assert calls.reservation is None
    calls.join(posted, cast("HotCycle", _Call()))
    for _ in range(2):
        calls.forget_blocks()
        assert len(msgspec.json.encode(calls.reservation)) < 2000
        assert calls.fits(posted)
        assert calls.fits(msgspec.structs.replace(posted, lost_attempt=Attempt(1), lost_reason="so", deadline_ms=3))
        assert not calls.fits(_other(posted))


def _other(posted: Posted) -> Posted:
    if isinstance(posted, LayerwiseCall):
        return msgspec.structs.replace(posted, posted=posted.posted[:-1] + b"}")
    return msgspec.structs.replace(posted, remote_block_ids=(IDS, (*IDS[:6], 9)))


class _Call:
    """An open call's cycle."""

    owner: object = None
