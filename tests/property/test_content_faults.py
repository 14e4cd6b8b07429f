"""Faults in the content of KV are found and healed, or end in one error: some of ``python -m tests.content_faults``."""

from __future__ import annotations

import pytest

from content_faults.faults import FAULTS
from content_faults.run import PAIRS, run_pair
from content_faults.scene import Scene
from pdcluster_connector.core.content import Found, find_mismatch
from pdcluster_protocol.params import ContentCheck

NUM_FAULTS = 4 * len(FAULTS)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_each_fault_is_found_and_healed_or_ends_in_one_error(prefill_tp: int, decode_tp: int) -> None:
    tally = run_pair(prefill_tp, decode_tp, NUM_FAULTS, seed=7)
    assert tally.wrong == []
    assert tally.done.total() == tally.healed.total() + tally.lost.total() == NUM_FAULTS
    assert tally.healed.total() > 0
    assert tally.lost.total() > 0


def test_samples_find_a_layer_that_is_missing_more_often_than_one_bit() -> None:
    tally = run_pair(2, 1, 20 * len(FAULTS), seed=7)
    assert tally.sampled["a layer missing"] > 10
    assert tally.sampled["one bit"] < 10


@pytest.mark.parametrize("check", [ContentCheck.FULL, ContentCheck.SAMPLED])
def test_what_went_well_has_equal_sums_under_every_pair(check: ContentCheck) -> None:
    for pair in PAIRS:
        scene = Scene(*pair, 3)
        for number, rank in enumerate(scene.decode):
            here = rank.reader.received(rank.order(check), "t")
            found = Found(here.plan, here.result())
            assert find_mismatch(found, scene.pushed(check, "t", number)) is None, f"TP {pair}, rank {number}"
