"""Pairing: what each event and each passed deadline makes the router do."""

from __future__ import annotations

import itertools

import pytest

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import TransferId
from pdcluster_router.core.pairing import TERMINAL, TRANSITIONS, Command, Event, Pairing, Phase, Timeouts

TIMEOUTS = Timeouts(request_s=100.0, prefill_s=60.0)

PATHS = {
    Phase.AWAITING_RESERVATION: [],
    Phase.PREFILLING: [Event.RESERVED],
    Phase.DECODING: [Event.RESERVED, Event.PREFILL_DONE],
    Phase.TRAILING: [Event.RESERVED, Event.DECODE_DONE],
    Phase.DONE: [Event.DECODE_DONE],
    Phase.FAILED: [Event.CLIENT_GONE],
}

STOP_BOTH = (Command.ABORT_PREFILL, Command.ABORT_DECODE, Command.REPLY_FAILED)


def pairing_in(phase: Phase, timeouts: Timeouts = TIMEOUTS) -> Pairing:
    pairing = Pairing(TransferId("t-1"), timeouts, now=0.0)
    for event in PATHS[phase]:
        pairing.handle(event, now=0.0)
    assert pairing.phase is phase
    return pairing


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)))
def test_every_pair_of_phase_and_event_is_decided(phase: Phase, event: Event) -> None:
    pairing = pairing_in(phase)
    if phase in TERMINAL:
        assert pairing.handle(event, now=1.0) == ()
    elif (phase, event) in TRANSITIONS:
        target, commands = TRANSITIONS[phase, event]
        assert pairing.handle(event, now=1.0) == commands
        assert pairing.phase is target
    else:
        with pytest.raises(ProtocolError, match=f"{event.name} while {phase.name}"):
            pairing.handle(event, now=1.0)
        assert pairing.phase is phase


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase not in TERMINAL])
def test_every_living_phase_can_end_whatever_breaks(phase: Phase) -> None:
    for event in (Event.DECODE_FAILED, Event.CLIENT_GONE):
        assert (phase, event) in TRANSITIONS
    pairing = pairing_in(phase)
    pairing.expire(now=100.0)
    assert pairing.is_over


def test_decode_reserves_then_prefill_starts_with_a_deadline_within_the_requests() -> None:
    pairing = pairing_in(Phase.AWAITING_RESERVATION)
    assert pairing.deadline == 100.0
    assert pairing.handle(Event.RESERVED, now=2.0) == (Command.START_PREFILL,)
    assert pairing.deadline == 62.0
    late = pairing_in(Phase.AWAITING_RESERVATION)
    late.handle(Event.RESERVED, now=90.0)
    assert late.deadline == 100.0


def test_a_client_that_leaves_during_prefill_stops_the_writer_before_the_blocks_are_freed() -> None:
    assert pairing_in(Phase.PREFILLING).handle(Event.CLIENT_GONE, now=1.0) == STOP_BOTH


def test_a_failed_prefill_is_decodes_to_deal_with() -> None:
    pairing = pairing_in(Phase.PREFILLING)
    assert pairing.handle(Event.PREFILL_FAILED, now=1.0) == (Command.REPLY_FAILED,)
    assert pairing.phase is Phase.DECODING
    assert pairing.deadline == 100.0


def test_a_prefill_that_takes_too_long_is_aborted_and_the_request_goes_on() -> None:
    pairing = pairing_in(Phase.PREFILLING)
    assert pairing.expire(now=59.9) == ()
    assert pairing.expire(now=60.0) == (Command.ABORT_PREFILL, Command.REPLY_FAILED)
    assert pairing.phase is Phase.DECODING


def test_the_requests_deadline_ends_it_in_every_phase() -> None:
    assert pairing_in(Phase.PREFILLING).expire(now=100.0) == (*STOP_BOTH, Command.ANSWER_TIMEOUT)
    for phase in (Phase.AWAITING_RESERVATION, Phase.DECODING):
        assert pairing_in(phase).expire(now=100.0) == (Command.ABORT_DECODE, Command.ANSWER_TIMEOUT)


def test_no_reservation_in_time_fails_the_request() -> None:
    pairing = pairing_in(Phase.AWAITING_RESERVATION, Timeouts(request_s=100.0, prefill_s=60.0, reservation_s=5.0))
    assert pairing.expire(now=4.9) == ()
    assert pairing.expire(now=5.0) == (Command.ABORT_DECODE, Command.ANSWER_TIMEOUT)
    assert pairing.phase is Phase.FAILED


def test_prefill_may_answer_after_decode_is_done_and_keeps_its_deadline() -> None:
    pairing = pairing_in(Phase.TRAILING)
    assert pairing.deadline == 60.0
    assert pairing.handle(Event.CLIENT_GONE, now=1.0) == ()
    assert pairing.handle(Event.PREFILL_DONE, now=2.0) == (Command.REPLY_OK,)
    assert pairing.phase is Phase.DONE


def test_a_trailing_prefill_that_never_answers_is_aborted() -> None:
    assert pairing_in(Phase.TRAILING).expire(now=100.0) == (Command.ABORT_PREFILL, Command.REPLY_FAILED)


def test_without_a_transfer_decode_is_all_there_is() -> None:
    pairing = Pairing(TransferId("t-1"), TIMEOUTS, now=0.0, with_transfer=False)
    assert not pairing.is_over
    assert pairing.handle(Event.DECODE_DONE, now=1.0) == ()
    assert pairing.phase is Phase.DONE


def test_a_request_that_decode_never_saw_starts_anew_with_the_old_deadline() -> None:
    pairing = pairing_in(Phase.AWAITING_RESERVATION, Timeouts(request_s=10.0, prefill_s=6.0, reservation_s=5.0))
    pairing.restart(TransferId("t-2"), now=8.0)
    assert (pairing.transfer_id, pairing.deadline) == ("t-2", 10.0)


@pytest.mark.parametrize("phase", [Phase.PREFILLING, Phase.TRAILING, Phase.DONE, Phase.FAILED])
def test_a_request_that_decode_did_see_is_not_restarted(phase: Phase) -> None:
    with pytest.raises(ProtocolError, match="cannot restart"):
        pairing_in(phase).restart(TransferId("t-2"), now=1.0)


def test_decode_is_told_ok_when_prefill_is_done_and_never_otherwise() -> None:
    """A law beside the table: the walk above compares the table with itself."""
    for (phase, event), (_, commands) in TRANSITIONS.items():
        assert (Command.REPLY_OK in commands) == (event is Event.PREFILL_DONE), (phase, event)
        if event is Event.PREFILL_FAILED:
            assert Command.REPLY_FAILED in commands, phase
