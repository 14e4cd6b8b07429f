"""Laws of the queue, whatever happens to it in whatever order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from drawn import drawn
from pdcluster_operator.core.queueing import KeyQueue, RetryPace

KEYS = st.sampled_from("abcde")
STEPS = st.floats(0, 30)
PACE = RetryPace(gather_s=0.5, first_s=1.0, most_s=60.0)
MAX_RUNNING = 2


class Queue(RuleBasedStateMachine):
    """The queue beside what a reader would expect: for each key the newest event that no run has begun after."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: KeyQueue[str] = KeyQueue(max_running=MAX_RUNNING, pace=PACE)
        self.now = 0.0
        self.running: set[str] = set()
        self.unseen: dict[str, float] = {}
        """When the first event came that no run has begun after."""
        self.quiet_until: dict[str, float] = {}

    @rule(seconds=STEPS)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=KEYS)
    def something_happens(self, key: str) -> None:
        self.queue.add(key, self.now)
        self.unseen.setdefault(key, self.now)

    @rule()
    def a_worker_is_free(self) -> None:
        key = self.queue.start_next(self.now)
        if key is None:
            return
        assert key not in self.running, "one task for a key"
        assert self.now >= self.quiet_until.get(key, 0.0), "what failed rests"
        self.running.add(key)
        self.unseen.pop(key, None)

    @rule(key=KEYS, wake=st.none() | STEPS)
    def a_run_ends_well(self, key: str, wake: float | None) -> None:
        if key in self.running:
            self.running.discard(key)
            self.quiet_until.pop(key, None)
            self.queue.finish(key, self.now, wake)

    @rule(key=KEYS, chance=st.floats(0, 0.99), asked=st.sampled_from([0.0, 5.0, 1e6]))
    def a_run_fails(self, key: str, chance: float, asked: float) -> None:
        if key in self.running:
            self.running.discard(key)
            self.quiet_until[key] = self.now + max(PACE.first_s, min(asked, PACE.most_s))
            self.queue.fail(key, self.now, chance=chance, asked_s=asked)

    @invariant()
    def never_more_run_than_there_are_workers(self) -> None:
        assert self.queue.num_running == len(self.running) <= MAX_RUNNING

    @invariant()
    def no_event_is_forgotten(self) -> None:
        """With room, everything that was said and not yet seen starts, within the longest rest."""
        if len(self.running) == MAX_RUNNING or not self.unseen.keys() - self.running:
            return
        due = self.queue.next_due()
        assert due is not None
        oldest = min(self.unseen[key] for key in self.unseen.keys() - self.running)
        assert due <= max(self.now, oldest) + PACE.gather_s + PACE.most_s

    def teardown(self) -> None:
        """In the end everything that was ever said has been looked at."""
        for key in list(self.running):
            self.running.discard(key)
            self.queue.finish(key, self.now)
        for _ in range(100):
            self.now += PACE.most_s
            while (due := self.queue.start_next(self.now)) is not None:
                self.unseen.pop(due, None)
                self.queue.finish(due, self.now)
        assert not self.unseen
        assert len(self.queue) == 0


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=drawn(300), stateful_step_count=60, deadline=None)
