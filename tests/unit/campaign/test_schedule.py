"""The same seed gives the same campaign, and no fault is left out."""

from __future__ import annotations

from collections import Counter

import pytest

from campaign.questions import MAX_PROMPT, make_questions
from campaign.schedule import DECK, Deed, Fault, Site, make_faults, make_orders, rank_deck

AT_A_RANK = {Deed.KILL_RANK, Deed.STOP_RANK, Deed.WRITES_OF_RANK}


def test_a_seed_fixes_requests_and_faults() -> None:
    questions = make_questions()
    assert make_faults(3, 500, every=8) == make_faults(3, 500, every=8) != make_faults(4, 500, every=8)
    orders = [make_orders(seed, 50, questions, rate=8) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_the_questions_are_the_same_every_time_and_of_all_lengths() -> None:
    questions = make_questions()
    assert questions == make_questions()
    lengths = {len(question.prompt) for question in questions}
    assert (min(lengths), max(lengths)) == (1, MAX_PROMPT)
    assert len(set(questions)) == len(questions)


def test_a_campaign_of_500_requests_deals_every_fault() -> None:
    dealt = {(fault.site, fault.deed) for fault in make_faults(1, 500, every=8)}
    assert dealt == set(DECK)


def test_prefill_and_decode_meet_every_deed_but_those_of_the_wire_and_of_single_ranks() -> None:
    for site in (Site.PREFILL, Site.DECODE):
        assert {deed for place, deed in DECK if place is site} == set(Deed) - {Deed.FRAMES, Deed.WRITES} - AT_A_RANK


@pytest.mark.parametrize("split", [[Site.PREFILL], [Site.DECODE], [Site.PREFILL, Site.DECODE]])
def test_faults_of_single_ranks_come_first_and_again_where_engines_have_several(split: list[Site]) -> None:
    """Writes are always of a prefill rank."""
    wanted = {*((site, deed) for site in split for deed in (Deed.KILL_RANK, Deed.STOP_RANK))}
    wanted |= {(Site.PREFILL, Deed.WRITES_OF_RANK)}
    dealt = [(fault.site, fault.deed) for fault in make_faults(1, 1000, every=8, split=split)]
    assert set(rank_deck(split)) == set(dealt[: len(wanted)]) == wanted
    assert set(dealt[len(wanted) :]) == set(DECK) | wanted


def test_engines_of_one_rank_meet_no_fault_of_a_rank() -> None:
    assert rank_deck([]) == ()
    assert not AT_A_RANK & {fault.deed for fault in make_faults(1, 10_000, every=8)}


def test_a_draw_names_each_rank_of_each_engine_as_often() -> None:
    draws = [Fault(0, Site.PREFILL, Deed.KILL_RANK, 1.0, number / 12) for number in range(12)]
    met = Counter((fault.engine_of(3), fault.rank_of(3, 2)) for fault in draws)
    assert met == {(engine, rank): 2 for engine in range(3) for rank in range(2)}


def test_stops_last_from_a_tenth_of_a_second_to_eight_and_every_fault_leaves_time_for_the_rest() -> None:
    faults = make_faults(1, 100_000, every=8)
    stops = [fault.seconds for fault in faults if fault.deed in (Deed.STOP, Deed.STOP_CORE)]
    assert 0.1 <= min(stops) < 0.3
    assert 7.8 < max(stops) <= 8.0
    assert all(0 < fault.at_request < 100_000 - 8 and 0 <= fault.draw < 1 for fault in faults)


def test_orders_come_in_bursts_at_the_wanted_rate_and_some_clients_leave_or_hurry() -> None:
    orders = make_orders(1, 20_000, make_questions(), rate=8)
    assert 0.9 < sum(order.gap_s for order in orders) / (20_000 / 8) < 1.1
    assert sum(order.gap_s == 0 for order in orders) > 15_000
    assert {order.is_stream for order in orders} == {True, False}
    leaves = [order.leave for order in orders if order.leave]
    assert 0.1 < len(leaves) / 20_000 < 0.14
    assert {leave.is_reset for leave in leaves} == {True, False}
    assert any(leave.after_bytes for leave in leaves)
    assert any(leave.after_s is not None for leave in leaves)
    assert 0.08 < sum(order.timeout_s is not None for order in orders) / 20_000 < 0.12
