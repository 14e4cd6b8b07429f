"""How little is kept of those who said hello: refused, replaced by a newer lane of their rank, or never invited."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from fractions import Fraction

import msgspec

from pdcluster_connector.core.link import Link
from pdcluster_connector.core.peers import EARLY_S, MAX_REFUSED, Incoming, Peers
from pdcluster_connector.core.receiving import Reply
from pdcluster_connector.core.reception import MAX_PARKED, PRUNE_EVERY_S, Reception
from pdcluster_connector.core.writers import PeerId
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.side_channel import Denial, Done, Fenced, Hello, Progress, RankLayout, Refusal, Revoke
from unit.connector.core.test_reception import (
    EXPECTED,
    FIRST,
    GRANT,
    NUM_BYTES,
    OTHER,
    PEER,
    PRINT,
    R,
    T,
    expecting,
    greet,
    hear,
    hello,
    open_,
    reception,
    report_of,
)

MANY = 3000
NOTHING = Incoming(Link((), (), Fraction(1)), Fraction(1), frozenset({0}))
LATER = EARLY_S + PRUNE_EVERY_S


def unfit() -> Hello:
    return hello(fingerprint=msgspec.structs.replace(PRINT, layout="LBNHC"))


def num_layouts() -> int:
    """How many layouts the whole process holds."""
    gc.collect()
    return sum(type(held) is RankLayout for held in gc.get_objects())


def reason_for(made: Reception, peer: PeerId, now: float = 1.0) -> str:
    reply = hear(made, open_(), peer, now)
    assert isinstance(reply, Refusal)
    return reply.reason


def test_thousands_of_refused_hellos_leave_no_layout() -> None:
    made, before = reception(is_greeted=False), num_layouts()
    for number in range(MANY):
        hear(made, unfit(), PeerId(b"%d" % number))
    assert num_layouts() == before


def test_thousands_of_lanes_of_one_rank_leave_one_layout() -> None:
    made, before = reception(is_greeted=False), num_layouts()
    for number in range(MANY):
        greet(made, peer=PeerId(b"%d" % number))
    assert num_layouts() == before + 1


def test_a_rank_that_says_something_else_is_worked_out_anew_and_one_that_repeats_itself_is_not() -> None:
    made, said = Peers(), [hello(), hello(), unfit()]
    asked: list[Hello] = []

    def work_out(news: Hello) -> Incoming:
        asked.append(news)
        return NOTHING

    for number, words in enumerate(said):
        made.add(PeerId(b"%d" % number), words, work_out, now=0.0)
    assert asked == [said[0], said[2]]
    newest = made.get(PeerId(b"2"))
    assert newest is not None
    assert newest.greeting.hello == said[2]


def test_engines_that_are_gone_leave_nothing() -> None:
    made = Peers()
    tracemalloc.start()
    for number in range(MANY):
        made.add(PEER, hello(boot=f"life {number}"), lambda _: NOTHING, now=0.0)
        made.forget(PEER)
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 20 * MANY


def test_parked_opens_are_bounded() -> None:
    made = reception()
    for number in range(MAX_PARKED):
        list(made.hear(PEER, open_(transfer=TransferId(f"t{number}")), now=0.0))
    last = TransferId("one more")
    denial = hear(made, open_(Attempt(2), transfer=last))
    assert isinstance(denial, Denial)
    assert (denial.transfer_id, denial.attempt) == (last, 2)


def test_a_refused_peer_is_told_the_same_reason_whenever_it_says_something() -> None:
    made = expecting(is_greeted=False)
    reply = hear(made, unfit())
    assert isinstance(reply, Refusal)
    assert "layout: prefill 'LBNHC', decode 'LBHNC'" in reply.reason
    assert hear(made, open_()) == hear(made, Done(T, FIRST, NUM_BYTES, 2)) == reply
    list(made.expire(now=LATER))
    assert "say hello first" in reason_for(made, PEER)


def test_a_refused_peer_that_is_welcome_later_or_forgotten_is_refused_no_more() -> None:
    made = Peers()
    for peer in (PEER, OTHER):
        made.refuse(peer, "another layout", now=0.0)
        assert made.refusal(peer) == "another layout"
    made.forget(PEER)
    made.add(OTHER, hello(), lambda _: NOTHING, now=1.0)
    assert made.refusal(PEER) == made.refusal(OTHER) == ""


def test_of_many_refused_peers_the_newest_are_told_why() -> None:
    made = reception(is_greeted=False)
    for number in range(MAX_REFUSED + 1):
        hear(made, unfit(), PeerId(b"%d" % number))
    assert "say hello first" in reason_for(made, PeerId(b"0"))
    assert "LBNHC" in reason_for(made, PeerId(b"1"))


def test_a_peer_that_was_refused_may_say_a_better_hello() -> None:
    made = expecting(is_greeted=False)
    hear(made, unfit())
    greet(made)
    assert hear(made, open_()) == GRANT


def test_a_peer_that_says_a_worse_hello_is_refused_from_then_on() -> None:
    made = expecting()
    hear(made, unfit())
    assert "LBNHC" in reason_for(made, PEER)


def test_a_rank_that_says_hello_anew_is_known_by_its_newest_lane_alone() -> None:
    made = reception()
    greet(made, peer=OTHER)
    list(made.expire(now=LATER))
    assert "say hello first" in reason_for(made, PEER)
    assert list(made.hear(OTHER, open_(), now=LATER)) == []


def test_other_ranks_and_other_lives_of_the_engine_replace_nobody() -> None:
    made = reception(is_greeted=False)
    for number, said in enumerate((hello(0, 2), hello(1, 2), hello(0, 2, boot="another"))):
        greet(made, said, PeerId(b"%d" % number))
    list(made.expire(now=LATER))
    assert [list(made.hear(PeerId(b"%d" % number), open_(), now=LATER)) for number in range(3)] == [[], [], []]


def test_an_older_lane_that_still_speaks_stays_known() -> None:
    made = reception()
    greet(made, peer=OTHER)
    list(made.hear(PEER, Progress(T, FIRST, 0), now=LATER - 1))
    list(made.expire(now=LATER))
    assert list(made.hear(PEER, open_(), now=LATER)) == []


def test_an_older_lane_whose_open_waits_for_its_announcement_stays_known() -> None:
    made = reception()
    list(made.hear(PEER, open_(deadline_ms=500_000), now=0.0))
    greet(made, peer=OTHER)
    list(made.expire(now=LATER))
    assert list(made.expect(replace(EXPECTED, deadline=500.0), now=LATER)) == [Reply(PEER, GRANT)]
    assert report_of(made.hear(PEER, Done(T, FIRST, NUM_BYTES, 2), now=LATER)).is_received


def test_an_older_lane_that_is_asked_to_stop_stays_known_until_it_has() -> None:
    made = reception(is_greeted=False, quarantine_s=500.0)
    list(made.expect(EXPECTED, now=0.0))
    greet(made)
    hear(made, open_())
    greet(made, peer=OTHER)
    assert list(made.cancel(R, "client left", now=1.0)) == [Reply(PEER, Revoke(T, FIRST))]
    list(made.expire(now=LATER))
    assert report_of(made.hear(PEER, Fenced(T, FIRST, is_clean=True), now=LATER)).reason == "client left"


def test_a_lane_that_was_never_given_a_session_is_forgotten() -> None:
    made, before = reception(is_greeted=False), num_layouts()
    list(made.hear(PEER, hello(), now=0.0))
    list(made.expire(now=LATER))
    assert num_layouts() == before
