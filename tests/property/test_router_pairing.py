"""Laws of the pairing over any history of events and passing time, with retries; and proof that the laws can see.

The machine plays the shell: it makes only events that the shell can make, carries out each command, and fails the
test when a command breaks a law. The same machine must find each of a row of bugs that are put in on purpose.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from drawn import drawn
from pdcluster_protocol.ids import TransferId
from pdcluster_router.core.requests.pairing import (
    Command,
    Event,
    Pairing,
    Phase,
    Retries,
    Timeouts,
    Transition,
)
from property.planted import check_it_is_found

REQUEST_S = 10.0
TIMEOUTS = st.builds(
    Timeouts,
    st.sampled_from([None, REQUEST_S]),
    st.sampled_from([2.0, 4.0, 20.0]),
    st.sampled_from([None, 1.5, 20.0]),
    transfer_s=st.sampled_from([5.0, REQUEST_S]),
    first_byte_s=st.sampled_from([5.0, REQUEST_S]),
    idle_s=st.sampled_from([1.5, 20.0]),
)
RETRIES = st.builds(Retries, st.integers(1, 3), st.integers(1, 2), st.booleans())


class History(RuleBasedStateMachine):
    """One request, and what the world knows of it."""

    kind: ClassVar[type[Pairing]] = Pairing

    @initialize(timeouts=TIMEOUTS, retries=RETRIES, with_transfer=st.sampled_from([True, True, True, False]))
    def begin(self, timeouts: Timeouts, retries: Retries, with_transfer: bool) -> None:
        self.now = 0.0
        self.retries = retries
        self.timeouts = timeouts
        self.heard_at = 0.0
        self.pairing = self.kind(TransferId("t-0"), timeouts, retries, now=0.0, with_transfer=with_transfer)
        self.has_transfer = with_transfer
        self.num_decodes = 1
        self.num_prefills = 0
        self.last_attempt = 0
        self.is_decode_running = True
        self.is_prefill_running = False
        self.is_call_open = False
        self.has_reserved = False
        self.is_local = False
        self.has_first_byte = False
        self.num_answers = 0
        self.has_engines_left = True

    # What the engines, the client and the clock do.

    @precondition(lambda self: self.has_transfer and not self.has_reserved and not self.has_first_byte)
    @rule()
    def decode_reserves(self) -> None:
        if self.pairing.phase is Phase.AWAITING_RESERVATION:
            self.has_reserved = self.is_call_open = True
            self.say(Event.RESERVED)

    @precondition(lambda self: self.has_transfer and not self.has_reserved and not self.has_first_byte)
    @rule()
    def decode_prefills_locally(self) -> None:
        if self.pairing.phase is Phase.AWAITING_RESERVATION:
            self.has_reserved = self.is_local = True
            self.say(Event.PREFILLS_LOCALLY)

    @precondition(lambda self: self.is_prefill_running)
    @rule()
    def prefill_is_done(self) -> None:
        self.is_prefill_running = False
        self.say(Event.PREFILL_DONE)

    @precondition(lambda self: self.is_prefill_running)
    @rule()
    def prefill_fails(self) -> None:
        self.is_prefill_running = False
        self.say(Event.PREFILL_FAILED)

    @precondition(lambda self: self.has_reserved)
    @rule()
    def decode_says_lost(self) -> None:
        if self.pairing.may_lose_attempt:
            self.is_call_open = True
            self.say(Event.ATTEMPT_LOST)

    @precondition(lambda self: self.is_call_open)
    @rule()
    def decode_hangs_up_on_the_metaserver(self) -> None:
        self.is_call_open = False
        self.say(Event.RESERVATION_LOST)

    @precondition(lambda self: self.is_decode_running and not self.has_first_byte)
    @rule()
    def decode_begins_to_answer(self) -> None:
        self.has_first_byte = True
        self.heard_at = self.now
        self.say(Event.FIRST_BYTE)

    @precondition(lambda self: self.is_decode_running and self.has_first_byte)
    @rule()
    def the_answer_flows(self) -> None:
        self.heard_at = self.now
        self.pairing.heard(now=self.now)

    @precondition(lambda self: self.is_decode_running and self.has_first_byte)
    @rule()
    def decode_ends(self) -> None:
        self.is_decode_running = False
        self.num_answers += 1
        self.say(Event.DECODE_DONE)

    @precondition(lambda self: self.is_decode_running)
    @rule(is_refusal=st.booleans())
    def decode_fails(self, is_refusal: bool) -> None:
        self.say(Event.DECODE_REFUSED if is_refusal and not self.has_first_byte else Event.DECODE_FAILED)

    @rule(
        what=st.sampled_from(
            [0.25, 1.0, 2.5, "client leaves", "client leaves", "router stops", "every engine was tried"]
        )
    )
    def time_passes_or_something_ends(self, what: float | str) -> None:
        """One rule for all of it: else most histories would be over before they become interesting."""
        if isinstance(what, float):
            self.now += what
            self.look_at_the_clock()
        elif what == "every engine was tried":
            self.has_engines_left = False
        elif what == "router stops":
            self.say(Event.GIVEN_UP)
        elif self.num_answers == 0:
            self.num_answers += 1  # It gets no other.
            self.say(Event.CLIENT_GONE)

    # What the shell does, and the laws of it.

    def say(self, event: Event) -> None:
        was_over = self.pairing.is_over
        commands = self.pairing.handle(event, now=self.now)
        assert not (was_over and commands), "nothing comes after the end"
        self.carry_out(commands)

    def look_at_the_clock(self) -> None:
        if event := self.pairing.late_event(now=self.now):
            self.carry_out(self.pairing.handle(event, now=self.now))

    def carry_out(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            getattr(self, command.name.lower())()

    def start_prefill(self) -> None:
        assert not self.is_prefill_running, "the writer before it must be stopped first"
        assert self.is_call_open, "nobody would learn how it ends"
        assert not self.is_local, "decode computes the prompt itself"
        assert self.pairing.attempt > self.last_attempt, "attempts only grow"
        assert not self.has_first_byte, "decode has all it needs"
        assert self.now < self.pairing.transfer_deadline or self.pairing.attempt == 1
        self.last_attempt = self.pairing.attempt
        if self.pairing.attempt > 1 and not self.has_engines_left:
            self.say(Event.NO_PREFILL_LEFT)
            return
        self.num_prefills += 1
        self.is_prefill_running = True

    def abort_prefill(self) -> None:
        self.is_prefill_running = False

    def start_decode(self) -> None:
        before = (self.is_decode_running, self.is_prefill_running, self.is_call_open)
        assert before == (False, False, False), "nothing is left of before"
        assert not self.has_first_byte, "never a doubled output"
        if not self.has_engines_left:
            self.say(Event.GIVEN_UP)
            return
        self.num_decodes += 1
        self.last_attempt = 0
        self.has_reserved = self.is_local = False
        self.is_decode_running = True
        self.pairing.restart(TransferId(f"t-{self.num_decodes}"), now=self.now)

    def abort_decode(self) -> None:
        assert not self.is_prefill_running, "the writer is stopped before the blocks are freed"
        self.is_decode_running = False

    def reply_ok(self) -> None:
        self.reply()

    def reply_failed(self) -> None:
        self.reply()

    def reply(self) -> None:
        assert self.is_call_open, "one outcome for each open question"
        self.is_call_open = False

    def answer_error(self) -> None:
        assert not self.is_decode_running
        assert self.num_answers == 0, "one answer"
        self.num_answers += 1

    answer_timeout = answer_error

    @invariant()
    def holds(self) -> None:
        pairing = self.pairing
        assert pairing.is_over or pairing.deadline <= self.latest(), "every wait has a limit"
        assert pairing.transfer_deadline <= REQUEST_S
        assert self.num_decodes <= self.retries.max_decode_attempts
        assert self.num_prefills <= self.retries.max_prefill_attempts + self.retries.max_decode_attempts - 1
        if pairing.is_over:
            running = (self.is_decode_running, self.is_prefill_running, self.is_call_open)
            assert running == (False, False, False), "nothing runs and nobody waits after the end"
            assert self.num_answers == 1, "one answer"

    def latest(self) -> float:
        """No wait is longer: until the first byte, or between two bytes, and never beyond the whole."""
        waits_for_reply = self.pairing.phase is Phase.TRAILING
        if not self.has_first_byte or waits_for_reply:
            return REQUEST_S
        flows = max(self.heard_at, self.now) + self.timeouts.idle_s
        return min(flows, self.timeouts.request_s or flows)

    def teardown(self) -> None:
        if not hasattr(self, "pairing"):
            return
        for late in (REQUEST_S, 3 * REQUEST_S):
            self.now += late
            self.look_at_the_clock()
        assert self.pairing.is_over, "every request ends"
        self.holds()
        assert self.pairing.handle(Event.CLIENT_GONE, now=self.now) == ()


THOROUGH = settings(max_examples=drawn(400), stateful_step_count=25, deadline=None)


def test_a_pairing_over_any_history_keeps_its_laws() -> None:
    run_state_machine_as_test(History, settings=THOROUGH)


class StartsBeforeItStops(Pairing):
    """The next attempt begins while the writer of the one before may still write."""

    __slots__ = ()

    def handle(self, event: Event, *, now: float) -> tuple[Command, ...]:
        commands = super().handle(event, now=now)
        return (Command.START_PREFILL,) if Command.START_PREFILL in commands else commands


class ForgetsTheCall(Pairing):
    """The metaserver call of a lost decode stays open."""

    __slots__ = ()

    def handle(self, event: Event, *, now: float) -> tuple[Command, ...]:
        commands = super().handle(event, now=now)
        is_lost = Command.START_DECODE in commands
        return tuple(command for command in commands if not (is_lost and command is Command.REPLY_FAILED))


class RetriesAfterTheFirstByte(Pairing):
    """The client gets a second beginning."""

    __slots__ = ()

    def _failed(self, key: tuple[Phase, Event], step: Transition, *, now: float) -> tuple[Command, ...]:
        phase, event = key
        return super()._failed((Phase.AWAITING_ANSWER if phase is Phase.DECODING else phase, event), step, now=now)


class FreesBeforeItStops(Pairing):
    """Decode's blocks are freed while prefill may still write."""

    __slots__ = ()

    def handle(self, event: Event, *, now: float) -> tuple[Command, ...]:
        commands = super().handle(event, now=now)
        if event is Event.CLIENT_GONE and Command.ABORT_PREFILL in commands:
            return (Command.ABORT_DECODE, Command.ABORT_PREFILL, Command.REPLY_FAILED)
        return commands


class AnswersTwice(Pairing):
    """A late prefill failure, after the answer has begun, is answered as well."""

    __slots__ = ()

    def handle(self, event: Event, *, now: float) -> tuple[Command, ...]:
        is_late = self.phase is Phase.ANSWERING and event is Event.PREFILL_FAILED
        commands = super().handle(event, now=now)
        return (*commands, Command.ANSWER_ERROR) if is_late else commands


class CountsNothing(Pairing):
    """Attempts without end."""

    __slots__ = ()

    def _attempt_failed(self, key: tuple[Phase, Event], *, now: float) -> tuple[Command, ...]:
        self._num_failed = 0
        return super()._attempt_failed(key, now=now)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [StartsBeforeItStops, ForgetsTheCall, RetriesAfterTheFirstByte, FreesBeforeItStops, AnswersTwice, CountsNothing],
)
def test_a_bug_that_is_put_in_on_purpose_is_found(kind: type[Pairing]) -> None:
    check_it_is_found(History, kind, num_histories=60_000, num_steps=15)
