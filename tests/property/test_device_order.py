"""Whatever order the streams of two ranks go on in, decode has the model's bytes, each written once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from integration.reshard_ranks import Scenario, assert_written_once
from patience import until
from property.slow_ranks import slow_ranks

STREAMS = ("forward", "exchange", "lane", "side")
TIGHT, WIDE = 64 << 10, 1 << 20
"""Staging memory for a page of each layer and no more, and for all."""

turns = st.lists(st.tuples(st.integers(0, 1), st.integers(0, len(STREAMS) - 1), st.integers(1, 4)), max_size=40)
"""Which rank's which stream may do how many operations more."""


@pytest.mark.long
@settings(max_examples=drawn(27), deadline=None)
@given(turns=turns, decode_tp=st.sampled_from([1, 4]), staging_bytes=st.sampled_from([TIGHT, WIDE]))
def test_decode_has_every_byte_whichever_stream_goes_on_first(
    turns: list[tuple[int, int, int]], decode_tp: int, staging_bytes: int
) -> None:
    scenario = Scenario(2, (((decode_tp, 200),), ((decode_tp, 90), (1, 150))), staging_bytes=staging_bytes)
    with slow_ranks(scenario) as ranks:
        for rank in ranks:
            rank.forward()
        for number, stream, count in turns:
            ranks[number].runtime.streams[stream].let(count)
            ranks[number].runtime.streams[stream].settle_soon()
        for rank in ranks:
            rank.runtime.release()
        assert until(lambda: all(rank.last_read == 1 for rank in ranks))
        for rank in ranks:
            rank.lane.synchronize()
            assert not rank.failures
            assert rank.staging.is_idle
        assert_written_once(scenario, [rank.written() for rank in ranks])
