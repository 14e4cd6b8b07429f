"""The same seed gives the same campaign, and no fault is left out."""

from __future__ import annotations

from collections import Counter

import pytest

from campaign.questions import MAX_PROMPT, make_questions
from campaign.schedule import DECK, Deed, Fault, Site, make_faults, make_orders, rank_deck

AT_A_RANK = {Deed.KILL_RANK, Deed.STOP_RANK, Deed.WRITES_OF_RANK}


def test_a_seed_fixes_requests_and_faults_and_questions_are_of_all_lengths() -> None:
    questions = make_questions()
    assert questions == make_questions()
    lengths = {len(question.prompt) for question in questions}
    assert (min(lengths), max(lengths), len(set(questions))) == (1, MAX_PROMPT, len(questions))
    assert make_faults(3, 500, every=8) == make_faults(3, 500, every=8) != make_faults(4, 500, every=8)
    orders = [make_orders(seed, 50, questions, rate=8) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_prefill_and_decode_meet_every_deed_but_those_of_the_wire_and_of_single_ranks() -> None:
    for site in (Site.PREFILL, Site.DECODE):
        assert {deed for place, deed in DECK if place is site} == set(Deed) - {Deed.FRAMES, Deed.WRITES} - AT_A_RANK


@pytest.mark.parametrize("split", [[], [Site.PREFILL], [Site.DECODE], [Site.PREFILL, Site.DECODE]])
def test_every_fault_is_dealt_and_those_of_single_ranks_come_first_and_again(split: list[Site]) -> None:
    """Writes are always of a prefill rank. Engines of one rank meet none of these."""
    wanted = {*((site, deed) for site in split for deed in (Deed.KILL_RANK, Deed.STOP_RANK))}
    wanted |= {(Site.PREFILL, Deed.WRITES_OF_RANK)} if split else set()
    dealt = [(fault.site, fault.deed) for fault in make_faults(1, 1000 if split else 500, every=8, split=split)]
    assert set(rank_deck(split)) == set(dealt[: len(wanted)]) == wanted
    assert set(dealt[len(wanted) :]) == set(DECK) | wanted


def test_a_draw_names_each_rank_of_each_engine_as_often_and_stops_are_short_and_long() -> None:
    draws = [Fault(0, Site.PREFILL, Deed.KILL_RANK, 1.0, number / 12) for number in range(12)]
    met = Counter((fault.engine_of(3), fault.rank_of(3, 2)) for fault in draws)
    assert met == {(engine, rank): 2 for engine in range(3) for rank in range(2)}
    faults = make_faults(1, 100_000, every=8)
    stops = [fault.seconds for fault in faults if fault.deed in (Deed.STOP, Deed.STOP_CORE)]
    assert 0.1 <= min(stops) < 0.3 < 7.8 < max(stops) <= 8.0
    assert all(0 < fault.at_request < 100_000 - 8 and 0 <= fault.draw < 1 for fault in faults)


def test_orders_come_in_bursts_at_the_wanted_rate_and_some_clients_leave_or_hurry() -> None:
    orders = make_orders(1, 20_000, make_questions(), rate=8)
    assert 0.9 < sum(order.gap_s for order in orders) / (20_000 / 8) < 1.1
    assert sum(order.gap_s == 0 for order in orders) > 15_000
    assert {order.is_stream for order in orders} == {True, False}
    leaves = [order.leave for order in orders if order.leave]
    assert 0.1 < len(leaves) / 20_000 < 0.14
    assert {(leave.is_reset, leave.after_s is None) for leave in leaves} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert 0.08 < sum(order.timeout_s is not None for order in orders) / 20_000 < 0.12
