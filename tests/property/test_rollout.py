"""Laws of whole rollouts, where pods start, die and go as slowly as they like and users change their minds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from random import Random
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from fakes.deployments import Ask, FakeDeployments
from pdcluster_operator.core.rollout.fleet import ROLES, Fleet
from pdcluster_operator.core.rollout.steps import Step, fleet_after, next_step, preview_steps
from pdcluster_protocol.labels import Role

SURGES: Final[st.SearchStrategy[int | str]] = st.sampled_from([0, 1, 2, "0%", "25%", "50%", "100%"])
UNAVAILABLE: Final[st.SearchStrategy[int | str]] = st.sampled_from([0, 1, 3, "25%", "100%"])
LIMITS: Final = st.tuples(SURGES, UNAVAILABLE).filter(lambda limits: limits[0] not in (0, "0%") or limits[1] != 0)
SIZES: Final = st.tuples(st.integers(1, 9), st.integers(1, 9))
MAX_TICKS: Final = 2000


@st.composite
def asks(draw: st.DrawFn, revisions: str = "ABC", *, can_break: bool = True) -> Ask:
    prefill, decode = draw(SIZES)
    limits, templates = draw(LIMITS), draw(st.tuples(st.sampled_from("tu"), st.sampled_from("tu")))
    revision = draw(st.sampled_from(revisions + ("X" if can_break else "")))
    return Ask(revision, prefill, decode, *limits, *templates, is_broken=revision == "X")


@dataclass(frozen=True, slots=True)
class Moment:
    """One decision, what the planner saw, and what it would see if its step had been applied and nothing else."""

    before: Fleet
    step: Step
    after: Fleet


@dataclass(slots=True)
class Story:
    """A cluster, and chance, which decides all delays, deaths and when the operator is there to look."""

    cluster: FakeDeployments
    chance: Random
    can_die: bool = True

    def run(self, ticks: int) -> Iterator[Moment]:
        """Time passes, until the end of the rollout or of ``ticks``."""
        for _ in range(ticks):
            if self.cluster.is_done():
                return
            yield from self._decide()
            self.cluster.tick()
            self._happen()

    def _decide(self) -> Iterator[Moment]:
        fleet = self.cluster.fleet()
        step = next_step(fleet) if self.chance.random() < 0.8 else None
        if step:
            yield Moment(fleet, step, fleet_after(fleet, step))
            is_killed = self.chance.random() < 0.1
            self.cluster.apply(step, self.chance.randint(0, len(step.changes)) if is_killed else None)

    def _happen(self) -> None:
        if self.can_die and self.chance.random() < 0.1:
            self.cluster.kill(self.chance.choice(sorted(self.cluster.all)))
        if self.chance.random() < 0.4:
            self.cluster.verify()


def story(first: Ask, chance: Random, *, can_die: bool = True, have_groups: bool = False) -> Story:
    cluster = FakeDeployments(first, lambda: chance.randint(0, 6), lambda: chance.randint(0, 4), have_groups)
    cluster.settle()
    return Story(cluster, chance, can_die)


def changing(first: Ask, asked: list[Ask], chance: Random, have_groups: bool) -> Iterator[Moment]:
    """The whole story: each ask replaces the one before at any moment; the last one is given time."""
    told = story(first, chance, have_groups=have_groups)
    for ask in asked[:-1]:
        told.cluster.want(ask)
        yield from told.run(chance.randint(0, 40))
    told.cluster.want(asked[-1])
    yield from told.run(60)
    told.can_die = False
    yield from told.run(MAX_TICKS)
    assert told.cluster.is_done(), told.cluster.fleet()


STORIES = st.builds(
    changing,
    asks(),
    st.tuples(st.lists(asks(), max_size=3), asks(can_break=False)).map(lambda parts: [*parts[0], parts[1]]),
    st.randoms(use_true_random=False),
    st.booleans(),
)
"""Of Deployments, and of LeaderWorkerSets. Consumed once; running it to its end asserts that the rollout ends."""


def growing(moment: Moment, role: Role) -> bool:
    before, after = moment.before.of(role).workloads, moment.after.of(role).workloads
    return any(now.replicas > was.replicas for now, was in zip(after, before, strict=True))


def useful(moment: Moment, fleet: Fleet, role: Role) -> int:
    """Ready ones in ``fleet`` of revisions that served before the step, and the target's."""
    return sum(
        min(workload.ready, workload.replicas)
        if workload.ready_groups is None
        else len([group for group in workload.ready_groups if group < workload.replicas])
        for workload in fleet.of(role).workloads
        if workload.revision == fleet.revision or moment.before.serves(workload.revision)
    )


def taken_back(moment: Moment, role: Role) -> int:
    """Ready groups of a target that has more than wanted: the last ones go, ready or not, for so the user wants it."""
    was, now = (fleet.of(role).target for fleet in (moment.before, moment.after))
    return max(was.staying - now.staying, 0) if was.ready_groups is not None and was.replicas > now.replicas else 0


def share_gap(fleet: Fleet) -> Fraction:
    """How far the target's shares of both roles are apart."""
    prefill, decode = (Fraction(fleet.of(role).target.replicas, fleet.of(role).wanted) for role in ROLES)
    return abs(prefill - decode)


def asked_of(fleet: Fleet, revision: str) -> list[int]:
    return [fleet.of(role).asked_of(revision) for role in ROLES]


@given(STORIES)
def test_the_target_grows_only_within_wanted_and_surge_and_every_rollout_ends(moments: Iterator[Moment]) -> None:
    for moment in moments:
        for role in ROLES:
            after = moment.after.of(role)
            pods = sum(max(workload.replicas, workload.live) + workload.terminating for workload in after.workloads)
            assert not growing(moment, role) or pods <= after.wanted + after.surge


@given(STORIES)
def test_useful_instances_never_fall_below_wanted_minus_unavailable_by_our_hand(moments: Iterator[Moment]) -> None:
    for moment in moments:
        for role in ROLES:
            was, now = (useful(moment, fleet, role) for fleet in (moment.before, moment.after))
            ours = moment.before.of(role)
            assert now >= was - taken_back(moment, role) or now >= ours.wanted - ours.unavailable


@given(STORIES)
def test_an_old_revision_keeps_one_of_each_role_that_is_ready_or_none_of_both(moments: Iterator[Moment]) -> None:
    for moment in moments:
        for revision in {old.revision for _, old in moment.before.old} - {moment.before.revision}:
            if all(asked_of(moment.before, revision)):
                kept = asked_of(moment.after, revision)
                assert all(kept) or not any(kept)
                assert not all(kept) or moment.after.serves(revision) == moment.before.serves(revision)


@given(STORIES)
def test_what_serves_is_left_only_for_a_verified_target_or_one_without_a_place(moments: Iterator[Moment]) -> None:
    for moment in moments:
        fleet = moment.before
        left = {old.revision for _, old in fleet.old} - {old.revision for _, old in moment.after.old}
        if any(fleet.serves(revision) for revision in left - {fleet.revision}):
            has_place = all(fleet.of(role).target.replicas for role in ROLES)
            assert (fleet.is_verified and fleet.serves(fleet.revision)) or not has_place


@given(STORIES)
def test_a_step_says_all_that_can_be_done_now(moments: Iterator[Moment]) -> None:
    for moment in moments:
        is_behind = any(w.live != w.replicas for role in ROLES for w in moment.before.of(role).workloads)
        assert is_behind or next_step(moment.after) is None


@given(STORIES)
def test_nothing_moves_while_paused_or_late_unless_nothing_old_is_left(moments: Iterator[Moment]) -> None:
    for moment in moments:
        for held in (replace(moment.before, is_paused=True), replace(moment.before, is_past_deadline=True)):
            assert next_step(held) == (None if any(held.old) else moment.step)


CALM: Final = st.tuples(
    asks("A", can_break=False), asks("B", can_break=False), st.randoms(use_true_random=False), st.booleans()
)
"""One change of revision; nobody dies and nobody changes their mind."""


def calm(first: Ask, then: Ask, chance: Random, have_groups: bool) -> Iterator[Moment]:
    told = story(first, chance, can_die=False, have_groups=have_groups)
    told.cluster.want(then)
    yield from told.run(MAX_TICKS)
    assert told.cluster.is_done()


@given(CALM)
def test_both_roles_stay_within_one_instance_of_the_same_share(parts: tuple[Ask, Ask, Random, bool]) -> None:
    for moment in calm(*parts):
        if any(moment.after.old):
            assert share_gap(moment.after) <= Fraction(1, min(moment.after.of(role).wanted for role in ROLES))


@given(CALM)
def test_with_a_spare_one_of_each_role_requests_find_the_promised_number_at_every_moment(
    parts: tuple[Ask, Ask, Random, bool],
) -> None:
    first, then, chance, have_groups = parts
    then = replace(then, surge=2)
    for moment in calm(replace(first, prefill=then.prefill, decode=then.decode), then, chance, have_groups):
        for role in ROLES:
            revisions = {workload.revision for workload in moment.after.of(role).workloads}
            serving = [moment.after.of(role).staying_of(it) for it in revisions if moment.after.serves(it)]
            assert sum(serving) >= moment.after.of(role).floor


@given(asks(), asks(), st.booleans())
def test_a_preview_has_few_steps_and_ends_with_the_target_alone(first: Ask, then: Ask, have_groups: bool) -> None:
    cluster = story(first, Random(0), have_groups=have_groups).cluster
    cluster.want(then)
    fleet, num_steps = cluster.fleet(), 0
    for step in preview_steps(fleet):
        fleet, num_steps = fleet_after(fleet, step), num_steps + 1
    assert [fleet.of(role).target.replicas for role in ROLES] == [then.prefill, then.decode]
    assert not any(fleet.old)
    assert num_steps <= 2 * (first.prefill + first.decode + then.prefill + then.decode)
