"""The processes of a router, over drawn histories: places are served again, seats are one process's, and it ends."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdcluster_router.core.processes.succession import (
    END_GRACE_S,
    MAX_SILENT_LOOKS,
    SEATS_PER_PLACE,
    START_LIMIT_S,
    EndRouter,
    HurryProcess,
    KillProcess,
    LetLeave,
    ProcessCommand,
    RenewalEnded,
    StartProcess,
    StopProcess,
    Succession,
)


class Processes(RuleBasedStateMachine):
    """A keeper's world: each living process with its place, and what it was told."""

    @initialize(num_places=st.integers(1, 4))
    def begin(self, num_places: int) -> None:
        self.now = 0.0
        self.succession = Succession(num_places)
        self.place_of: dict[int, int] = {}
        self.ready: set[int] = set()
        self.leaving: set[int] = set()
        self.stopped: set[int] = set()
        self.killed: set[int] = set()
        self.status: int | None = None
        self.started_at: dict[int, float] = {}
        self.num_silent: dict[int, int] = {}
        self.renewed_at = 0.0
        self.is_renewing = False
        self._carry_out(self.succession.begin(now=self.now))

    def _carry_out(self, commands: Sequence[ProcessCommand]) -> None:
        for command in commands:
            assert self.status is None, "nothing comes after the end"
            match command:
                case StartProcess(place, seat):
                    self._start(place, seat)
                case LetLeave(seat):
                    self._let_leave(seat)
                case StopProcess(seat) | HurryProcess(seat):
                    self.stopped.add(seat)
                case KillProcess(seat):
                    self.killed.add(seat)
                case RenewalEnded(num_old):
                    assert len(self._old()) == num_old
                    self.is_renewing = False
                case EndRouter(status):
                    assert not self.place_of, "no process is left"
                    self.status = status

    def _start(self, place: int, seat: int) -> None:
        assert seat not in self.place_of, "a seat belongs to one process"
        assert not self.succession.is_ending
        self.place_of[seat], self.started_at[seat] = place, self.now

    def _let_leave(self, seat: int) -> None:
        others = {one for one in self.ready if self.place_of[one] == self.place_of[seat] and one != seat}
        assert others - self.leaving, "another process serves the place already"
        self.leaving.add(seat)

    def _old(self) -> set[int]:
        """The processes that stay, and were started before the last renewal."""
        return {seat for seat in self.place_of if seat not in self.leaving and self.started_at[seat] < self.renewed_at}

    @precondition(lambda self: self.status is None and set(self.place_of) - self.ready)
    @rule(data=st.data())
    def becomes_ready(self, data: st.DataObject) -> None:
        self._become_ready(data.draw(st.sampled_from(sorted(set(self.place_of) - self.ready))))

    def _become_ready(self, seat: int) -> None:
        self.ready.add(seat)
        self.num_silent[seat] = 0
        self._carry_out(self.succession.ready(seat, now=self.now))

    @precondition(lambda self: self.status is None and self.place_of)
    @rule(data=st.data(), status=st.integers(0, 2))
    def ends(self, data: st.DataObject, status: int) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.place_of))), status)

    def _end(self, seat: int, status: int) -> None:
        del self.place_of[seat]
        for some in (self.ready, self.leaving, self.stopped, self.killed):
            some.discard(seat)
        self._carry_out(self.succession.ended(seat, status, now=self.now))

    @precondition(lambda self: self.status is None)
    @rule()
    def renews(self) -> None:
        self.renewed_at, self.is_renewing = self.now, not self.succession.is_ending
        self._carry_out(self.succession.renew(now=self.now))

    @precondition(lambda self: self.status is None)
    @rule(drain_s=st.sampled_from([0.0, 30.0]))
    def stops(self, drain_s: float) -> None:
        self._carry_out(self.succession.stop(now=self.now, drain_s=drain_s))

    @precondition(lambda self: self.status is None)
    @rule(num_looks=st.sampled_from([1, 40]), speaks=st.booleans())
    def looks(self, num_looks: int, *, speaks: bool) -> None:
        for _ in range(num_looks):
            for seat in self.ready if speaks else ():
                self.succession.heard(seat)
                self.num_silent[seat] = 0
            before = set(self.killed)
            self._carry_out(self.succession.look())
            for seat in self.ready:
                self.num_silent[seat] = self.num_silent.get(seat, 0) + 1
            silent = {seat for seat in self.ready if self.num_silent[seat] > MAX_SILENT_LOOKS}
            assert self.killed - before <= silent, "only those are killed that say nothing"
            assert silent <= self.killed

    @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, 20.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.status is None:
            self._carry_out(self.succession.tick(now=self.now))

    @invariant()
    def each_place_is_served_or_will_be(self) -> None:
        """While the router goes on, each place has a process that does not leave, or a time at which one starts."""
        if self.status is not None or self.succession.is_ending:
            return
        staying = {place for seat, place in self.place_of.items() if seat not in self.leaving}
        missing = set(range(self.succession.num_places)) - staying
        due = self.succession.next_at()
        assert not missing or due is not None

    @invariant()
    def seats_are_few(self) -> None:
        assert len(self.place_of) <= SEATS_PER_PLACE * self.succession.num_places
        assert sorted(self.succession._by_seat) == sorted(self.place_of)

    @invariant()
    def all_are_told_to_stop(self) -> None:
        if self.succession.is_ending:
            assert self.status is not None or set(self.place_of) == self.stopped

    def _go_well(self) -> None:
        """If all goes well from now on, each place is served, by a process that is not older than the renewal."""
        for _ in range(20 * self.succession.num_places):
            if self.status is not None or self.succession.is_ending:
                return
            for seat in sorted(self.leaving | self.killed):
                if seat in self.place_of:
                    self._end(seat, 0)
            for seat in sorted(set(self.place_of) - self.ready):
                self._become_ready(seat)
            self.now = max(self.now, self.succession.next_at() or 0.0)
            self._carry_out(self.succession.tick(now=self.now))
        serving = self.ready - self.leaving
        assert {self.place_of[seat] for seat in serving} == set(range(self.succession.num_places))
        assert not self.is_renewing, "a renewal ends"

    def teardown(self) -> None:
        """However it went, it can be ended: those that do nothing of what they are told are killed in time."""
        if not hasattr(self, "succession"):
            return
        self._go_well()
        if self.status is None:
            self._carry_out(self.succession.stop(now=self.now, drain_s=30.0))
        while self.status is None:
            due = self.succession.next_at()
            assert due is not None
            assert due <= self.now + 30.0 + END_GRACE_S + START_LIMIT_S
            self.now = max(self.now, due)
            self._carry_out(self.succession.tick(now=self.now))
            for seat in sorted(self.killed):
                self._end(seat, 9)


TestProcesses = Processes.TestCase
