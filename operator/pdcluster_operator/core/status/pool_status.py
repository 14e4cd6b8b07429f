"""Makes a PDCluster's status from facts and the status before. A second run with the same facts changes nothing.

Ready = Accepted, every wanted instance of both roles is the target's and ready, routers are ready, and a real request
was answered through the target with KV that was pushed. Progressing and its deadline are as in a Deployment
(Kubernetes 1.35 ``deployment/progress.go``): progress is any count that gets better. A changed spec begins the deadline
anew, for it may be the cure. A loss after completion fails no rollout. Degraded is for a pager: too few ready engines,
no ready router, a crash loop, or a failed rollout or transfer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from pdcluster_operator.core.status.conditions import Condition, Counts, Reason, Status, Truth, Type
from pdcluster_protocol.labels import Role


class Verification(Enum):
    """The state of a request through the target, as this leader knows it."""

    NOT_ASKED = auto()
    PASSED = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Problems:
    """Why pods do not get ready, in words, such as ``ImagePullBackOff``; empty: there is no problem.

    ``crash_loop``: about a container of an engine or a router that dies of the same cause again and again.
    """

    prefill: str = ""
    decode: str = ""
    routers: str = ""
    crash_loop: str = ""

    def of(self, role: Role) -> str:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class Facts:
    """The shell's findings. ``refusal``: why the spec cannot be carried out, for people; empty when it can.

    ``target``: its name, or the revision alone if there is a refusal. ``verification`` and ``verification_error`` are
    about this target.
    ``missing_secret``: the problem of a user's Secret that routers mount; empty: there is none.
    ``held_back``: the old routers to which gateways are led until a new one is ready, in words; empty: there are none.
    ``is_target_empty``: one role's workload of the target asks for no instance, or is not there.
    ``unknown_fields``: fields of the object that this operator does not know, and leaves out.
    ``held_by_groups``: why the order of groups holds the rollout up, and the cure; empty: it does not.
    """

    generation: int
    target: str
    prefill: Counts
    decode: Counts
    routers_wanted: int
    routers_ready: int
    deadline_s: int
    refusal: str = ""
    verification: Verification = Verification.NOT_ASKED
    verification_error: str = ""
    is_paused: bool = False
    problems: Problems = Problems()
    is_target_empty: bool = False
    unknown_fields: tuple[str, ...] = ()
    missing_secret: str = ""
    held_back: str = ""
    held_by_groups: str = ""

    @property
    def is_held(self) -> bool:
        """Whether a refusal or a pause stops the rollout, so that no time counts against the deadline."""
        return bool(self.refusal) or self.is_paused

    @property
    def is_stopped(self) -> bool:
        return not self.prefill.wanted

    @property
    def is_proof_void(self) -> bool:
        """Whether engines of the target go or have gone, so that their proof does not hold for engines that come later.

        A stop counts only if the spec is not refused: a refused spec removes no engine.
        """
        return self.is_target_empty or (self.is_stopped and not self.refusal)

    def of(self, role: Role) -> Counts:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class _Judgement:
    """A condition before it has times."""

    truth: Truth
    reason: Reason
    message: str


MAX_MESSAGE: Final = 32768
"""Characters of a condition's message. The API server takes no more, as in Kubernetes' own conditions. A refusal quotes
the spec, which may be longer."""
ROLE_CONDITIONS: Final = {Role.PREFILL: Type.PREFILL_READY, Role.DECODE: Type.DECODE_READY}
_NEEDED: Final = (Type.ACCEPTED, Type.PREFILL_READY, Type.DECODE_READY, Type.ROUTER_READY, Type.TRANSFER_VERIFIED)
FAILURES: Final = frozenset({Reason.VERIFICATION_FAILED, Reason.PROGRESS_DEADLINE_EXCEEDED, Reason.CRASH_LOOP})
_MOVING: Final = frozenset({Reason.ROLLING_OUT, Reason.CRASH_LOOP, Reason.HELD_BY_GROUPS})
"""While Progressing has one of these, the deadline runs."""
_HELD_UP: Final = "; the rollout is held up: "
_HELD: Final = frozenset({Reason.ROLLOUT_PAUSED, Reason.NOT_ACCEPTED})
"""While Progressing has one of these, no time counts against the deadline."""


def reduce_status(facts: Facts, before: Status | None, *, now: int) -> Status:
    """The status to write. ``now`` and ``before``'s times: whole Unix seconds."""
    status = Status(facts.generation, facts.target, verified_target(facts, before), facts.prefill, facts.decode)
    findings = {
        Type.ACCEPTED: _accepted(facts),
        **{condition: _role_ready(facts, role) for role, condition in ROLE_CONDITIONS.items()},
        Type.ROUTER_READY: _router_ready(facts),
        Type.TRANSFER_VERIFIED: _transfer_verified(facts, status.verified, before),
    }
    progressed_s = _progressed_s(facts, status, before, now)
    findings[Type.PROGRESSING] = _progressing(facts, status, before, now, progressed_s)
    findings[Type.DEGRADED] = _degraded(facts, findings, status.verified)
    findings[Type.READY] = _ready(findings)
    for condition, finding in findings.items():
        status = status.with_condition(_timed(condition, finding, before, facts.generation, now))
    return _with_progress_time(status, progressed_s)


def deadline_at(status: Status, deadline_s: int) -> int | None:
    """Unix seconds at which the progress deadline is over, so that status changes; None: no deadline runs."""
    progressing = status.condition(Type.PROGRESSING)
    if not progressing or progressing.reason not in _MOVING or progressing.update_s is None:
        return None
    return progressing.update_s + deadline_s


def verified_target(facts: Facts, before: Status | None) -> str:
    """The target that is proven, or empty.

    Status keeps a proof, so a new leader need not ask again. The proof of this target ends if a request fails or its
    engines go. The proof of another target is kept, for a rollback to engines that are still there.
    """
    if facts.is_stopped and not facts.refusal:
        return ""  # No engine of any target outlives a stop.
    if facts.verification is Verification.PASSED and not facts.is_proof_void:
        return facts.target
    remembered = before.verified if before else ""
    is_lost = facts.is_proof_void or facts.verification is Verification.FAILED
    return "" if is_lost and remembered == facts.target else remembered


def _accepted(facts: Facts) -> _Judgement:
    if facts.refusal:
        return _Judgement(Truth.FALSE, Reason.REFUSED, facts.refusal)
    if facts.unknown_fields:
        told = f"the spec is carried out without {', '.join(facts.unknown_fields)}: this operator does not know them"
        return _Judgement(Truth.TRUE, Reason.UNKNOWN_FIELDS, told)
    return _Judgement(Truth.TRUE, Reason.VALID, "the spec can be carried out")


def _role_ready(facts: Facts, role: Role) -> _Judgement:
    counts = facts.of(role)
    if facts.is_stopped:
        return _Judgement(Truth.FALSE, Reason.SCALED_TO_ZERO, f"no {role.value} instance is wanted")
    message = f"{counts.updated_ready} of {counts.wanted} {role.value} instances are up to date and ready"
    if counts.updated_ready >= counts.wanted:
        return _Judgement(Truth.TRUE, Reason.INSTANCES_READY, message)
    return _Judgement(Truth.FALSE, Reason.INSTANCES_NOT_READY, _because(message, facts.problems.of(role)))


def _router_ready(facts: Facts) -> _Judgement:
    message = f"{facts.routers_ready} of {facts.routers_wanted} routers are ready"
    problem = _because(message, facts.missing_secret or facts.problems.routers)
    told = f"{problem}; {facts.held_back}" if facts.held_back else ""
    if 0 < facts.routers_wanted <= facts.routers_ready and not facts.missing_secret:
        return _Judgement(Truth.TRUE, Reason.ROUTERS_READY, told or message)
    return _Judgement(Truth.FALSE, Reason.ROUTERS_NOT_READY, told or problem)


def _transfer_verified(facts: Facts, verified: str, before: Status | None) -> _Judgement:
    if facts.is_stopped:
        return _Judgement(Truth.UNKNOWN, Reason.SCALED_TO_ZERO, "no instance is wanted that could be asked")
    if verified == facts.target:
        return _Judgement(Truth.TRUE, Reason.VERIFIED, f"a request was answered with pushed KV through {facts.target}")
    if facts.verification is Verification.FAILED:
        return _Judgement(Truth.FALSE, Reason.VERIFICATION_FAILED, facts.verification_error)
    if (error := _remembered_failure(facts, before)) is not None:
        return _Judgement(Truth.FALSE, Reason.VERIFICATION_FAILED, error)
    return _Judgement(Truth.UNKNOWN, Reason.VERIFICATION_PENDING, f"no request was sent through {facts.target} yet")


def _remembered_failure(facts: Facts, before: Status | None) -> str | None:
    """Why an earlier leader's request through these engines failed; None: none failed.

    A new leader knows no results yet, and must not end an alarm before it has a result of its own.
    """
    if before is None or before.target != facts.target or facts.is_proof_void:
        return None
    was = before.condition(Type.TRANSFER_VERIFIED)
    return was.message if was and was.reason is Reason.VERIFICATION_FAILED else None


def _progressing(facts: Facts, status: Status, before: Status | None, now: int, progressed_s: int) -> _Judgement:
    message = ", ".join(
        f"{role.value} {counts.updated_ready} of {counts.wanted} up to date and ready, {_num_old(counts)} old"
        for role, counts in ((role, facts.of(role)) for role in Role)
    )
    if facts.refusal:
        return _Judgement(Truth.UNKNOWN, Reason.NOT_ACCEPTED, "nothing moves until the spec is accepted")
    if facts.is_paused:
        return _Judgement(Truth.UNKNOWN, Reason.ROLLOUT_PAUSED, message)
    if _is_complete(status, before):
        return _Judgement(Truth.TRUE, Reason.ROLLOUT_COMPLETE, f"{facts.target} is what runs")
    loop = facts.problems.crash_loop or _remembered_loop(facts, before, status)
    if now >= progressed_s + facts.deadline_s:
        late = _because(f"no progress in {facts.deadline_s} s: {message}", _held_up(loop, facts))
        return _Judgement(Truth.FALSE, Reason.PROGRESS_DEADLINE_EXCEEDED, late)
    if loop:
        return _Judgement(Truth.FALSE, Reason.CRASH_LOOP, _held_up(loop, facts))
    if facts.held_by_groups:
        return _Judgement(Truth.FALSE, Reason.HELD_BY_GROUPS, _because(message, facts.held_by_groups))
    return _Judgement(Truth.TRUE, Reason.ROLLING_OUT, message)


def _held_up(loop: str, facts: Facts) -> str:
    """The crash loop, and what holds the rollout up beside it."""
    return _HELD_UP.join(told for told in (loop, facts.held_by_groups) if told)


def _remembered_loop(facts: Facts, before: Status | None, status: Status) -> str:
    """The crash loop that status already tells of; empty: none, or a count got better since. Status keeps it: the
    container may be between two lives, and a new leader has seen no death yet."""
    was = before.condition(Type.PROGRESSING) if before else None
    if before is None or was is None or was.reason is not Reason.CRASH_LOOP:
        return ""
    is_over = _has_progressed(facts, before, status) or _have_routers_come(facts, before)
    return "" if is_over else was.message.partition(_HELD_UP)[0]


def _have_routers_come(facts: Facts, before: Status) -> bool:
    """Whether all routers are ready now and were not before. This ends a crash loop, but is no rollout's progress."""
    was = before.condition(Type.ROUTER_READY)
    is_missing = was is not None and was.truth is Truth.FALSE
    return is_missing and _router_ready(facts).truth is Truth.TRUE


def _degraded(facts: Facts, findings: dict[Type, _Judgement], verified: str) -> _Judgement:
    failed = next((found for found in findings.values() if found.reason in FAILURES), None)
    if failed:
        return _Judgement(Truth.TRUE, failed.reason, failed.message)
    if facts.problems.crash_loop:
        return _Judgement(Truth.TRUE, Reason.CRASH_LOOP, facts.problems.crash_loop)
    # A first start lacks instances too, but nothing is lost yet. If the start fails, its deadline tells. Where none is
    # ready, a proof says that engines have served before.
    has_lost_all = bool(verified) and not all(facts.of(role).ready for role in Role)
    has_old = any(_num_old(facts.of(role)) for role in Role)
    is_first_start = findings[Type.PROGRESSING].reason is Reason.ROLLING_OUT and not (has_lost_all or has_old)
    shortages = _shortages(facts)
    if shortages and not is_first_start:
        return _Judgement(Truth.TRUE, Reason.TOO_FEW_READY, "; ".join(shortages))
    return _Judgement(Truth.FALSE, Reason.AS_WANTED, "no fewer are ready than promised")


def _ready(findings: dict[Type, _Judgement]) -> _Judgement:
    missing = next(((needed, findings[needed]) for needed in _NEEDED if findings[needed].truth is not Truth.TRUE), None)
    if missing is None:
        return _Judgement(Truth.TRUE, Reason.SERVING, "all instances are ready, and a transfer was verified")
    return _Judgement(Truth.FALSE, missing[1].reason, f"{missing[0].value}: {missing[1].message}")


def _timed(condition: Type, finding: _Judgement, before: Status | None, generation: int, now: int) -> Condition:
    """The finding with the time of its last change of truth."""
    was = before.condition(condition) if before else None
    since = was.transition_s if was and was.truth is finding.truth else now
    return Condition(condition, finding.truth, finding.reason, finding.message[:MAX_MESSAGE], generation, since)


def _with_progress_time(status: Status, progressed_s: int) -> Status:
    conditions = tuple(
        replace(condition, update_s=progressed_s) if condition.type is Type.PROGRESSING else condition
        for condition in status.conditions
    )
    return replace(status, conditions=conditions)


def _progressed_s(facts: Facts, status: Status, before: Status | None, now: int) -> int:
    """Unix seconds of the last progress: now if a count got better, the spec was changed, or the rollout begins or goes
    on again now."""
    was = before.condition(Type.PROGRESSING) if before else None
    if before is None or was is None or was.update_s is None or before.observed_generation != facts.generation:
        return now
    return now if _has_progressed(facts, before, status) else was.update_s


def _has_progressed(facts: Facts, before: Status, status: Status) -> bool:
    reason = before.reason(Type.PROGRESSING)
    is_incomplete_again = reason is Reason.ROLLOUT_COMPLETE and not _is_complete(status, before)
    # A held rollout does not go on: otherwise each look would move the time, and write the status.
    goes_on = reason in _HELD and not facts.is_held
    if before.target != status.target or goes_on or is_incomplete_again:
        return True
    is_new_proof = status.verified == status.target != before.verified
    is_looping = bool(facts.problems.crash_loop) or reason is Reason.CRASH_LOOP
    return is_new_proof or any(_is_better(status.of(role), before.of(role), is_looping) for role in Role)


def _is_better(now: Counts, before: Counts, is_looping: bool) -> bool:
    """Whether there are more updated, fewer old or more ready instances (as ``DeploymentProgressing`` in Kubernetes).

    Fewer terminating instances are progress too: the rollout may have waited for their place.

    In a crash loop more updated or fewer terminating instances are no progress: a LeaderWorkerSet makes an instance
    anew after each death, which would move the deadline for ever.
    """
    is_moving = now.updated > before.updated or now.terminating < before.terminating
    return (
        (is_moving and not is_looping)
        or _num_old(now) < _num_old(before)
        or now.ready > before.ready
        or now.updated_ready > before.updated_ready
    )


def _is_complete(status: Status, before: Status | None) -> bool:
    """Whether the rollout has reached its end: now, or earlier if no old engine came back since.

    So a loss after the end does not make the rollout incomplete. The end of a stop does not count when engines are
    wanted again: the target may never have run.
    """
    is_proven = status.verified == status.target or not status.prefill.wanted
    if is_proven and all(status.of(role).is_updated for role in Role):
        return True
    was_complete = before is not None and before.reason(Type.PROGRESSING) is Reason.ROLLOUT_COMPLETE
    is_same = before is not None and before.target == status.target
    starts_again = before is not None and not before.prefill.wanted and status.prefill.wanted > 0
    return was_complete and is_same and not starts_again and not any(_num_old(status.of(role)) for role in Role)


def _num_old(counts: Counts) -> int:
    return counts.replicas - counts.updated


def _shortages(facts: Facts) -> list[str]:
    """Roles with fewer ready instances than promised, and routers if none is ready: a sentence for each."""
    few = [role for role in Role if facts.of(role).ready < facts.of(role).least]
    told = [
        _because(
            f"{facts.of(it).ready} {it.value} instances are ready, {facts.of(it).least} were promised",
            facts.problems.of(it),
        )
        for it in few
    ]
    if facts.routers_ready or facts.is_stopped:
        return told
    return [*told, _because("no router is ready", facts.problems.routers)]


def _because(message: str, problem: str) -> str:
    return f"{message}: {problem}" if problem else message
