"""Laws of the room for calls, over any callers that take, give back and leave: it is bounded, no crowd keeps an address
with nothing out, and everything comes back."""

from __future__ import annotations

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from drawn import drawn
from pdcluster_router.core.clients.room import Room, RoomLimit
from pdcluster_router.front.callers import Callers

ROOM_BYTES = 8_000
CROWD = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
HONEST = "10.0.0.9"
HONEST_BYTES = ROOM_BYTES // 8 // (2 * len(CROWD) + 1)
"""An engine's call: the part that clients leave, so that the fattest of the crowd holds over twice as much."""


class Connection:
    """One connection to the internal port. ``given``: what it holds in each piece."""

    def __init__(self, callers: Callers, address: str) -> None:
        self.is_in_use = self.is_cut = False
        self.given: list[int] = []
        assert callers.opened(self, address)
        self.callers, self.address, self.room = callers, address, callers.room_of(self)

    def take(self, num_bytes: int) -> bool:
        if self.room.take(num_bytes, RoomLimit.ENGINES):
            self.given.append(num_bytes)
            return True
        return False

    def abort(self) -> None:
        self.is_cut = True

    def end(self) -> None:
        """As the event loop says it, some time after ``abort``."""
        for num_bytes in self.given:
            self.room.give_back(num_bytes)
        self.callers.closed(self)


class Port(RuleBasedStateMachine):
    """Clients take what they may have; a crowd sends half calls from a few addresses; an engine calls now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(ROOM_BYTES)
        self.callers = Callers(1000, self.room, 1024, lambda _: None)
        self.crowd: list[Connection] = []
        self.client_bytes = 0

    @rule(address=st.sampled_from(CROWD), pieces=st.lists(st.sampled_from([1, 10, 100, 700]), max_size=40))
    def half_calls_come(self, address: str, pieces: list[int]) -> None:
        for num_bytes in pieces:
            one = Connection(self.callers, address)
            if one.take(num_bytes):
                self.crowd.append(one)
            else:  # It is refused, and its connection ends.
                one.end()

    @rule(addresses=st.permutations(CROWD), num_bytes=st.sampled_from([20, 100, 700]))
    def a_crowd_takes_all_that_it_gets(self, addresses: list[str], num_bytes: int) -> None:
        for address in addresses:
            self.half_calls_come(address, [num_bytes] * (ROOM_BYTES // 4 // num_bytes))

    @rule(num_bytes=st.sampled_from([1, 300, 7000]))
    def clients_take(self, num_bytes: int) -> None:
        if self.room.take(num_bytes, RoomLimit.CLIENTS):
            self.client_bytes += num_bytes

    @rule()
    def clients_give_back(self) -> None:
        self.room.give_back(self.client_bytes)
        self.client_bytes = 0

    @rule(index=st.integers(0, 99))
    def one_goes_on(self, index: int) -> None:
        assume(self.crowd)
        one = self.crowd[index % len(self.crowd)]
        held = one.room.used_bytes
        if one.take(50):
            assert one.is_cut or one.room.used_bytes == held + 50

    @rule(index=st.integers(0, 99))
    def one_ends(self, index: int) -> None:
        assume(self.crowd)
        self.crowd.pop(index % len(self.crowd)).end()

    @rule()
    def an_engine_calls(self) -> None:
        before = {address: self.held_by(address) for address in CROWD}
        call = Connection(self.callers, HONEST)
        assert call.take(HONEST_BYTES)
        assert not call.is_cut
        call.end()
        assert all(self.held_by(one) == before[one] or before[one] > HONEST_BYTES for one in CROWD)

    @rule()
    def clients_have_the_rest(self) -> None:
        assume(not self.client_bytes)
        assert self.room.take(5 * ROOM_BYTES // 8, RoomLimit.CLIENTS)
        self.room.give_back(5 * ROOM_BYTES // 8)

    def held_by(self, address: str) -> int:
        return sum(one.room.used_bytes for one in self.crowd if one.address == address)

    @invariant()
    def it_is_bounded_and_adds_up(self) -> None:
        calls = sum(one.room.used_bytes for one in self.crowd)
        assert self.room.used_bytes == self.client_bytes + calls <= ROOM_BYTES
        assert calls <= ROOM_BYTES // 4
        assert all(one.room.used_bytes == (0 if one.is_cut else sum(one.given)) for one in self.crowd)

    def teardown(self) -> None:
        for one in self.crowd:
            one.end()
        self.room.give_back(self.client_bytes)
        assert (self.room.used_bytes, self.callers.num_open) == (0, 0)


def test_no_crowd_keeps_a_call_out_and_all_comes_back() -> None:
    run_state_machine_as_test(Port, settings=settings(max_examples=drawn(150), stateful_step_count=40, deadline=None))
