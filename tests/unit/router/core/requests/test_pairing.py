"""Pairing: what each event and each passed deadline makes the router do."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.labels import Role
from pdcluster_router.core.requests.pairing import (
    DECODE_RETRIES,
    FAILS_AT_ONCE,
    PREFILL_RETRIES,
    TERMINAL,
    TRANSITIONS,
    WORK,
    Command,
    Event,
    Pairing,
    Phase,
    Retries,
    Timeouts,
)

TIMEOUTS = Timeouts(request_s=100.0, prefill_s=60.0)
ONCE = Retries(max_prefill_attempts=1, max_decode_attempts=1)

PATHS = {
    Phase.AWAITING_RESERVATION: [],
    Phase.PREFILLING: [Event.RESERVED],
    Phase.AWAITING_ANSWER: [Event.RESERVED, Event.PREFILL_DONE],
    Phase.LOCAL_PREFILL: [Event.RESERVED, Event.NO_PREFILL_LEFT],
    Phase.ANSWERING: [Event.RESERVED, Event.FIRST_BYTE],
    Phase.DECODING: [Event.RESERVED, Event.PREFILL_DONE, Event.FIRST_BYTE],
    Phase.TRAILING: [Event.RESERVED, Event.DECODE_DONE],
    Phase.DONE: [Event.DECODE_DONE],
    Phase.FAILED: [Event.CLIENT_GONE],
}

STOP_BOTH = (Command.ABORT_PREFILL, Command.ABORT_DECODE, Command.REPLY_FAILED)
NEXT_PREFILL = (Command.ABORT_PREFILL, Command.START_PREFILL)
PREFILL_OVER = (Command.ABORT_PREFILL, Command.REPLY_FAILED)


def pairing_in(phase: Phase, timeouts: Timeouts = TIMEOUTS, retries: Retries = ONCE) -> Pairing:
    pairing = Pairing(TransferId("t-1"), timeouts, retries, now=0.0)
    for event in PATHS[phase]:
        pairing.handle(event, now=0.0)
    assert pairing.phase is phase
    return pairing


def expire(pairing: Pairing, *, now: float) -> tuple[Command, ...]:
    """What the router does when it looks at the clock."""
    event = pairing.late_event(now=now)
    return () if event is None else pairing.handle(event, now=now)


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)))
def test_every_pair_of_phase_and_event_is_decided(phase: Phase, event: Event) -> None:
    pairing = pairing_in(phase)
    if phase in TERMINAL:
        assert pairing.handle(event, now=1.0) == ()
    elif (phase, event) in TRANSITIONS:
        pairing.handle(event, now=1.0)  # What it orders: the tests below, and those of the laws.
    else:
        with pytest.raises(ProtocolError, match=f"{event.name} while {phase.name}"):
            pairing.handle(event, now=1.0)
        assert pairing.phase is phase


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in TERMINAL])
def test_every_living_phase_can_end_whatever_breaks(phase: Phase) -> None:
    for event in (Event.DECODE_FAILED, Event.GIVEN_UP, Event.CLIENT_GONE, Event.REQUEST_TIMED_OUT):
        assert (phase, event) in TRANSITIONS
    pairing = pairing_in(phase)
    expire(pairing, now=100.0)
    assert pairing.is_over


def test_decode_reserves_then_prefill_starts_with_a_deadline_within_the_requests() -> None:
    pairing = pairing_in(Phase.AWAITING_RESERVATION)
    assert pairing.deadline == 100.0
    assert pairing.handle(Event.RESERVED, now=2.0) == (Command.START_PREFILL,)
    assert pairing.deadline == 62.0
    late = pairing_in(Phase.AWAITING_RESERVATION)
    late.handle(Event.RESERVED, now=90.0)
    assert late.deadline == 100.0


def test_decode_that_prefills_locally_is_bound_by_no_reservation_time() -> None:
    pairing = pairing_in(Phase.AWAITING_RESERVATION, replace(TIMEOUTS, reservation_s=2.0))
    assert pairing.deadline == 2.0
    assert pairing.handle(Event.PREFILLS_LOCALLY, now=1.0) == ()
    assert (pairing.phase, pairing.deadline, WORK[pairing.phase]) == (Phase.LOCAL_PREFILL, 100.0, Role.DECODE)


def test_a_client_that_leaves_during_prefill_stops_the_writer_before_the_blocks_are_freed() -> None:
    assert pairing_in(Phase.PREFILLING).handle(Event.CLIENT_GONE, now=1.0) == STOP_BOTH


def test_the_last_failed_attempt_is_decodes_to_deal_with() -> None:
    pairing = pairing_in(Phase.PREFILLING)
    assert pairing.handle(Event.PREFILL_FAILED, now=1.0) == PREFILL_OVER
    assert pairing.phase is Phase.LOCAL_PREFILL
    assert pairing.deadline == 100.0


def test_a_last_attempt_that_takes_too_long_is_aborted_and_the_request_goes_on() -> None:
    pairing = pairing_in(Phase.PREFILLING)
    assert expire(pairing, now=59.9) == ()
    assert expire(pairing, now=60.0) == PREFILL_OVER
    assert pairing.phase is Phase.LOCAL_PREFILL


def test_the_requests_deadline_ends_it_in_every_phase() -> None:
    for phase in (Phase.PREFILLING, Phase.ANSWERING):
        assert expire(pairing_in(phase), now=100.0) == (*STOP_BOTH, Command.ANSWER_TIMEOUT)
    for phase in (Phase.AWAITING_RESERVATION, Phase.AWAITING_ANSWER, Phase.LOCAL_PREFILL, Phase.DECODING):
        assert expire(pairing_in(phase), now=100.0) == (Command.ABORT_DECODE, Command.ANSWER_TIMEOUT)


def test_the_requests_time_counts_from_the_clients_request_and_not_from_its_admission() -> None:
    pairing = Pairing(TransferId("t-1"), TIMEOUTS, now=30.0, began_at=10.0)
    assert pairing.transfer_deadline == pairing.deadline == 110.0


FLOWING = Timeouts(request_s=None, prefill_s=60.0, transfer_s=100.0, first_byte_s=100.0, idle_s=10.0)


def test_an_answer_that_flows_is_never_cut_and_one_that_stands_is() -> None:
    pairing = pairing_in(Phase.DECODING, FLOWING)
    for now in range(5, 10_000, 5):
        assert expire(pairing, now=now) == ()
        pairing.heard(now=now)
    assert expire(pairing, now=now + 9.9) == ()
    assert expire(pairing, now=now + 10.0) == (Command.ABORT_DECODE, Command.ANSWER_TIMEOUT)


@pytest.mark.parametrize("phase", [Phase.AWAITING_RESERVATION, Phase.AWAITING_ANSWER, Phase.LOCAL_PREFILL])
def test_bytes_move_no_deadline_before_the_answer_has_begun(phase: Phase) -> None:
    pairing = pairing_in(phase, FLOWING)
    pairing.heard(now=99.0)
    assert pairing.deadline == 100.0
    assert expire(pairing, now=100.0) == (Command.ABORT_DECODE, Command.ANSWER_TIMEOUT)


def test_a_prefill_that_is_late_does_not_end_an_answer_that_flows() -> None:
    pairing = pairing_in(Phase.ANSWERING, FLOWING)
    pairing.heard(now=59.0)
    assert expire(pairing, now=60.0) == PREFILL_OVER
    assert pairing.phase is Phase.DECODING
    assert expire(pairing, now=70.0) == (Command.ABORT_DECODE, Command.ANSWER_TIMEOUT)


def test_an_answer_that_stands_while_prefills_reply_is_out_stops_both() -> None:
    assert expire(pairing_in(Phase.ANSWERING, FLOWING), now=10.0) == (*STOP_BOTH, Command.ANSWER_TIMEOUT)


def test_an_answer_that_is_not_streamed_has_longer_than_its_transfer() -> None:
    plain = replace(FLOWING, first_byte_s=1000.0, prefill_s=300.0)
    pairing = pairing_in(Phase.PREFILLING, plain, Retries())
    assert pairing.deadline == pairing.transfer_deadline == 100.0
    assert expire(pairing, now=100.0) == PREFILL_OVER  # No time for another attempt: decode computes it.
    assert pairing.deadline == 1000.0
    assert pairing_in(Phase.AWAITING_ANSWER, plain).deadline == 1000.0


def test_a_total_is_the_shortest_of_all() -> None:
    short = replace(FLOWING, request_s=5.0)
    assert pairing_in(Phase.PREFILLING, short).transfer_deadline == 5.0
    flowing = pairing_in(Phase.DECODING, short)
    flowing.heard(now=4.9)
    assert expire(flowing, now=5.0) == (Command.ABORT_DECODE, Command.ANSWER_TIMEOUT)


def test_no_reservation_in_time_fails_the_request() -> None:
    pairing = pairing_in(Phase.AWAITING_RESERVATION, Timeouts(request_s=100.0, prefill_s=60.0, reservation_s=5.0))
    assert expire(pairing, now=4.9) == ()
    assert expire(pairing, now=5.0) == (Command.ABORT_DECODE, Command.ANSWER_TIMEOUT)
    assert pairing.phase is Phase.FAILED


def test_prefill_may_answer_after_decode_is_done_and_keeps_its_deadline() -> None:
    pairing = pairing_in(Phase.TRAILING)
    assert pairing.deadline == 60.0
    assert pairing.handle(Event.CLIENT_GONE, now=1.0) == ()
    assert pairing.handle(Event.PREFILL_DONE, now=2.0) == (Command.REPLY_OK,)
    assert pairing.phase is Phase.DONE


@pytest.mark.parametrize("now", [60.0, 100.0])
def test_a_trailing_prefill_that_never_answers_is_aborted(now: float) -> None:
    pairing = pairing_in(Phase.TRAILING)
    assert expire(pairing, now=now) == PREFILL_OVER
    assert pairing.is_over


def test_without_a_transfer_decode_is_all_there_is() -> None:
    pairing = Pairing(TransferId("t-1"), TIMEOUTS, now=0.0, with_transfer=False)
    assert not pairing.is_over
    assert WORK[pairing.phase] is Role.DECODE
    assert pairing.handle(Event.DECODE_DONE, now=1.0) == ()
    assert pairing.phase is Phase.DONE


# Prefill again.


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        (Phase.PREFILLING, Event.PREFILL_FAILED),
        (Phase.PREFILLING, Event.PREFILL_TIMED_OUT),
        (Phase.PREFILLING, Event.ATTEMPT_LOST),
        (Phase.AWAITING_ANSWER, Event.ATTEMPT_LOST),
    ],
)
def test_an_attempt_that_fails_is_followed_by_the_next_one_after_its_writer_is_stopped(
    phase: Phase, event: Event
) -> None:
    pairing = pairing_in(phase, retries=Retries(max_prefill_attempts=2))
    assert pairing.handle(event, now=5.0) == NEXT_PREFILL
    assert (pairing.phase, pairing.attempt, pairing.deadline) == (Phase.PREFILLING, 2, 65.0)
    assert pairing.handle(Event.PREFILL_FAILED, now=6.0) == PREFILL_OVER
    assert pairing.attempt == 2


def test_an_attempt_that_runs_out_of_its_own_time_leaves_the_rest_to_the_next() -> None:
    pairing = pairing_in(Phase.PREFILLING, retries=Retries())
    assert expire(pairing, now=60.0) == NEXT_PREFILL
    assert pairing.deadline == 100.0


def test_no_attempt_is_started_when_the_requests_time_is_over() -> None:
    pairing = pairing_in(Phase.PREFILLING, retries=Retries())
    assert pairing.handle(Event.PREFILL_FAILED, now=100.0) == PREFILL_OVER


def test_when_no_prefill_engine_is_left_decode_is_told_at_once() -> None:
    pairing = pairing_in(Phase.PREFILLING, retries=Retries())
    pairing.handle(Event.PREFILL_FAILED, now=1.0)
    assert pairing.handle(Event.NO_PREFILL_LEFT, now=1.0) == (Command.REPLY_FAILED,)
    assert pairing.phase is Phase.LOCAL_PREFILL


@pytest.mark.parametrize(("phase", "event"), list(FAILS_AT_ONCE))
def test_where_decode_shall_not_recompute_the_client_gets_the_last_failure_at_once(phase: Phase, event: Event) -> None:
    pairing = pairing_in(phase, retries=Retries(max_prefill_attempts=1, recomputes=False))
    assert pairing.handle(event, now=1.0) == (*STOP_BOTH, Command.ANSWER_ERROR)
    assert pairing.phase is Phase.FAILED


def test_an_attempt_cannot_be_lost_any_more_once_the_answer_has_begun() -> None:
    assert [phase for phase in Phase if pairing_in(phase).may_lose_attempt] == [
        Phase.PREFILLING,
        Phase.AWAITING_ANSWER,
    ]
    assert {phase for phase, event in TRANSITIONS if event is Event.ATTEMPT_LOST} == {
        Phase.PREFILLING,
        Phase.AWAITING_ANSWER,
    }


def test_a_decode_that_hung_up_on_the_metaserver_may_come_back_and_ask_for_the_next_attempt() -> None:
    pairing = pairing_in(Phase.PREFILLING, retries=Retries())
    assert pairing.handle(Event.RESERVATION_LOST, now=1.0) == (Command.ABORT_PREFILL,)
    assert pairing.handle(Event.ATTEMPT_LOST, now=2.0) == NEXT_PREFILL


def test_a_prefill_that_fails_after_the_answer_has_begun_changes_nothing_for_the_client() -> None:
    for retries in (Retries(), Retries(recomputes=False)):
        pairing = pairing_in(Phase.ANSWERING, retries=retries)
        assert pairing.handle(Event.PREFILL_FAILED, now=1.0) == PREFILL_OVER
        assert pairing.phase is Phase.DECODING


# Decode again.


@pytest.mark.parametrize(
    ("phase", "first"),
    [
        (Phase.AWAITING_RESERVATION, (Command.ABORT_DECODE,)),
        (Phase.PREFILLING, STOP_BOTH),
        (Phase.AWAITING_ANSWER, (Command.ABORT_DECODE,)),
        (Phase.LOCAL_PREFILL, (Command.ABORT_DECODE,)),
    ],
)
def test_a_decode_that_fails_before_the_first_byte_is_followed_by_another_as_if_it_were_new(
    phase: Phase, first: tuple[Command, ...]
) -> None:
    pairing = pairing_in(phase, retries=Retries(max_decode_attempts=2))
    assert pairing.handle(Event.DECODE_FAILED, now=5.0) == (*first, Command.START_DECODE)
    pairing.restart(TransferId("t-2"), now=5.0)
    assert (pairing.phase, pairing.attempt, pairing.deadline) == (Phase.AWAITING_RESERVATION, 1, 100.0)
    assert pairing.handle(Event.RESERVED, now=6.0) == (Command.START_PREFILL,)
    assert pairing.handle(Event.DECODE_FAILED, now=7.0) == (*STOP_BOTH, Command.ANSWER_ERROR)


@pytest.mark.parametrize("phase", [Phase.ANSWERING, Phase.DECODING])
def test_after_the_first_byte_nothing_is_tried_again(phase: Phase) -> None:
    pairing = pairing_in(phase, retries=Retries(max_decode_attempts=9))
    assert pairing.handle(Event.DECODE_FAILED, now=1.0)[-1] is Command.ANSWER_ERROR
    assert pairing.is_over


def test_a_decode_without_a_transfer_is_tried_again_without_one() -> None:
    pairing = Pairing(TransferId("t-1"), TIMEOUTS, Retries(), now=0.0, with_transfer=False)
    assert pairing.handle(Event.DECODE_FAILED, now=1.0) == (Command.ABORT_DECODE, Command.START_DECODE)
    assert pairing.phase is Phase.LOCAL_PREFILL


def test_failed_prefills_are_counted_over_the_whole_request() -> None:
    pairing = pairing_in(Phase.PREFILLING, retries=Retries(max_prefill_attempts=3, max_decode_attempts=2))
    pairing.handle(Event.PREFILL_FAILED, now=1.0)
    pairing.handle(Event.PREFILL_FAILED, now=1.0)
    pairing.handle(Event.DECODE_FAILED, now=1.0)
    pairing.handle(Event.RESERVED, now=2.0)
    assert pairing.handle(Event.PREFILL_FAILED, now=3.0) == PREFILL_OVER


def test_no_other_decode_is_asked_when_the_time_is_over() -> None:
    pairing = pairing_in(Phase.AWAITING_RESERVATION, retries=Retries())
    assert pairing.handle(Event.DECODE_FAILED, now=100.0) == (Command.ABORT_DECODE, Command.ANSWER_ERROR)


def test_a_request_that_decode_never_saw_starts_anew_with_the_old_deadline() -> None:
    pairing = pairing_in(Phase.AWAITING_RESERVATION, Timeouts(request_s=10.0, prefill_s=6.0, reservation_s=5.0))
    pairing.restart(TransferId("t-2"), now=8.0)
    assert (pairing.transfer_id, pairing.deadline) == ("t-2", 10.0)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.AWAITING_RESERVATION])
def test_a_request_that_decode_did_see_is_not_restarted(phase: Phase) -> None:
    with pytest.raises(ProtocolError, match="cannot restart"):
        pairing_in(phase).restart(TransferId("t-2"), now=1.0)


# Laws beside the tables: the walk above compares them with themselves.


def test_decode_is_told_ok_when_prefill_is_done_and_never_otherwise() -> None:
    for (phase, event), (_, commands) in TRANSITIONS.items():
        assert (Command.REPLY_OK in commands) == (event is Event.PREFILL_DONE), (phase, event)
        if event is Event.PREFILL_FAILED:
            assert Command.REPLY_FAILED in commands, phase


@pytest.mark.parametrize("table", [TRANSITIONS, PREFILL_RETRIES, DECODE_RETRIES, FAILS_AT_ONCE])
def test_what_is_started_is_started_last_so_that_it_may_fail_at_once(
    table: dict[tuple[Phase, Event], tuple[Phase, tuple[Command, ...]]],
) -> None:
    for _, commands in table.values():
        assert not {Command.START_PREFILL, Command.START_DECODE} & set(commands[:-1])


def test_every_retry_has_an_end_for_when_nothing_is_left() -> None:
    assert {*PREFILL_RETRIES, *DECODE_RETRIES, *FAILS_AT_ONCE} <= set(TRANSITIONS)
