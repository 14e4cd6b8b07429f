"""Why a pod does not get ready, and when its deaths make a crash loop."""

from __future__ import annotations

from typing import Any, Final

import pytest

from pdcluster_operator.core.seen.problems import Death, counted, deaths_of, trouble_of, worst_of

BEGAN: Final = "2026-01-01T00:00:00Z"
SOON: Final = "2026-01-01T00:00:30Z"
LATE: Final = "2026-01-01T01:00:00Z"
OOM: Final = {"exitCode": 137, "reason": "OOMKilled", "startedAt": BEGAN, "finishedAt": SOON}
ERROR: Final = {"exitCode": 1, "reason": "Error", "startedAt": BEGAN, "finishedAt": SOON}
DENIED: Final = 'failed to pull and unpack image "ghcr.io/x:1": failed to authorize: 401 Unauthorized'
BACKS_OFF: Final[dict[str, Any]] = {
    "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}
}


def container(name: str = "engine", *, restarts: int = 0, last: Any = None, **state: Any) -> dict[str, Any]:
    return {"name": name, "restartCount": restarts, "state": state, "lastState": {"terminated": last} if last else {}}


def status(*containers: Any, init: tuple[Any, ...] = (), **rest: Any) -> dict[str, Any]:
    return {"containerStatuses": list(containers), "initContainerStatuses": list(init), **rest}


def told(found: dict[str, Any]) -> str:
    """Of a pod that nobody has seen before."""
    death = worst_of(deaths_of(found, is_going=False))
    return trouble_of("x", found) or (death.told_of("x") if death else "")


def waits(reason: str, message: str = "") -> dict[str, Any]:
    return container(waiting={"reason": reason, "message": message})


@pytest.mark.parametrize(
    ("found", "says"),
    [
        pytest.param(status(waits("ContainerCreating")), "", id="it merely starts"),
        pytest.param(status(container(running={"startedAt": BEGAN})), "", id="it loads its model"),
        pytest.param(
            status(waits("ErrImagePull", DENIED)),
            f"pod x, container engine: ImagePullBackOff: {DENIED}",
            id="the registry's words, at the try",
        ),
        pytest.param(
            status(waits("ImagePullBackOff", f'Back-off pulling image "ghcr.io/x:1": ErrImagePull: {DENIED}')),
            f"pod x, container engine: ImagePullBackOff: {DENIED}",
            id="the same words between two tries",
        ),
        pytest.param(
            status(waits("CreateContainerConfigError", 'secret "hub" not found')),
            'pod x, container engine: CreateContainerConfigError: secret "hub" not found',
            id="a Secret that is not there",
        ),
        pytest.param(
            status(container(terminated=OOM)),
            "pod x, container engine died: OOMKilled (exit code 137)",
            id="the first death",
        ),
        pytest.param(
            status(container(restarts=1, last=OOM, **BACKS_OFF)),
            "pod x, container engine died 2 times, the last time OOMKilled (exit code 137)",
            id="it waits for its third life",
        ),
        pytest.param(
            status(container(restarts=2, last=OOM, running={"startedAt": SOON})),
            "pod x, container engine died 2 times, the last time OOMKilled (exit code 137)",
            id="in its third life: the same words",
        ),
        pytest.param(
            status(container(terminated={**ERROR, "message": "INFO ok\nValueError: no\n  room\n"})),
            "pod x, container engine died: Error (exit code 1): INFO ok | ValueError: no | room",
            id="the log's last lines",
        ),
        pytest.param(
            status(waits("PodInitializing"), init=(container("fetch", restarts=4, last=ERROR, **BACKS_OFF),)),
            "pod x, container fetch died 5 times, the last time Error (exit code 1)",
            id="a container that runs first",
        ),
        pytest.param(
            status(init=(container("fetch", restarts=1, last=ERROR, terminated={"exitCode": 0}),)),
            "",
            id="one that has done its work in the end",
        ),
        pytest.param(
            status(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
            "pod x has failed: Evicted: The node was low on resource: memory.",
            id="evicted",
        ),
    ],
)  # fmt: skip
def test_a_pod_tells_why_it_is_not_ready(found: dict[str, Any], says: str) -> None:
    assert told(found) == says


def test_of_a_long_log_the_end_is_told_and_of_a_long_answer_the_beginning() -> None:
    long = " ".join(f"word{number}" for number in range(2000))
    by_log = told(status(container(terminated={**ERROR, "message": long})))
    by_registry = told(status(waits("ErrImagePull", long)))
    assert by_log.endswith("word1999")
    assert by_registry.endswith("...")
    assert max(len(by_log), len(by_registry)) < 800


def in_a_row(*pictures: tuple[str, dict[str, Any]]) -> list[int]:
    """Equal deaths in a row, seen in one picture after the other: uid and status."""
    known: tuple[Death, ...] = ()
    uid, rows = "", []
    for this, found in pictures:
        known = counted(deaths_of(found, is_going=False), known, is_same_pod=this == uid)
        death, uid = worst_of(known), this
        rows.append(death.equal if death else 0)
    return rows


def lives(count: int, ended: dict[str, Any], **conditions: Any) -> dict[str, Any]:
    """A pod in its next life after so many deaths."""
    return status(container(restarts=count, last=ended, running={"startedAt": SOON}), **conditions)


def test_equal_deaths_are_counted_and_another_cause_begins_anew() -> None:
    assert in_a_row(("a", lives(1, OOM)), ("a", lives(2, OOM)), ("a", lives(3, OOM))) == [1, 2, 3]
    assert in_a_row(("a", lives(2, ERROR)), ("a", lives(3, OOM)), ("a", lives(4, OOM))) == [2, 1, 2]


def test_the_pictures_of_one_death_count_once() -> None:
    dies, waiting = status(container(terminated=OOM)), status(container(restarts=0, last=OOM, **BACKS_OFF))
    assert in_a_row(("a", dies), ("a", waiting), ("a", lives(1, OOM)), ("a", lives(1, OOM))) == [1, 1, 1, 1]


def test_who_sees_a_pod_for_the_first_time_believes_kubernetes_count() -> None:
    assert in_a_row(("a", lives(5, OOM))) == [5]


def died_at(count: int, started: str, finished: str = SOON) -> dict[str, Any]:
    """A pod of ``started`` that has just died for the ``count``-th time, after 30 s."""
    began = finished.replace(":30Z", ":00Z")
    return lives(count, {**OOM, "startedAt": began, "finishedAt": finished}, startTime=started)


def test_deaths_that_may_be_months_apart_are_no_row_at_first_sight_and_become_one_when_seen() -> None:
    """Seven old deaths and one short new one: Kubernetes counts all of a pod's and tells the time of the last."""
    old = "2025-10-01T00:00:00Z"
    pictures = [died_at(8, old), died_at(9, old, "2026-01-01T00:02:30Z"), died_at(10, old, "2026-01-01T00:05:30Z")]
    assert in_a_row(*(("a", picture) for picture in pictures)) == [1, 2, 3]
    assert told(died_at(8, old)).startswith("pod x, container engine died 8 times, the last time OOMKilled")


@pytest.mark.parametrize(
    ("life", "started", "row"),
    [
        pytest.param(OOM, "2025-12-31T23:00:00Z", 5, id="an hour"),
        pytest.param(OOM, "2025-12-31T22:00:00Z", 1, id="two hours"),
        pytest.param({**OOM, "startedAt": "2025-12-31T23:30:00Z"}, "2025-12-31T22:00:00Z", 5, id="each loads long"),
    ],
)
def test_five_deaths_are_a_row_at_first_sight_where_no_long_life_fits_between_them(
    life: dict[str, Any], started: str, row: int
) -> None:
    assert in_a_row(("a", lives(5, life, startTime=started))) == [row]


def test_a_group_that_is_made_anew_after_each_death_is_counted_by_its_name() -> None:
    pictures = [("a", lives(1, OOM)), ("b", status()), ("b", lives(1, OOM)), ("c", lives(1, OOM)), ("d", status())]
    assert in_a_row(*pictures) == [1, 1, 2, 3, 3]


def test_what_ends_in_a_pod_that_was_told_to_go_is_no_death() -> None:
    ended = status(container(terminated={"exitCode": 143, "reason": "Error"}))
    assert deaths_of(ended, is_going=True) == ()
    assert [one.count for one in deaths_of(lives(1, OOM), is_going=True)] == [1]


UNREADY_LATE: Final = [{"type": "Ready", "status": "False", "lastTransitionTime": LATE}]
UNREADY_SOON: Final = [{"type": "Ready", "status": "False", "lastTransitionTime": "2025-12-31T23:00:00Z"}]


def test_a_long_life_that_served_ends_a_row_and_a_long_start_does_not() -> None:
    long = {**OOM, "finishedAt": LATE}
    served, loaded = lives(4, long, conditions=UNREADY_LATE), lives(4, long, conditions=UNREADY_SOON)
    assert in_a_row(("a", lives(3, OOM)), ("a", {**served, "containerStatuses": [
        container(restarts=4, last=long, running={"startedAt": LATE})]})) == [3, 1]  # fmt: skip
    assert in_a_row(("a", lives(3, OOM)), ("a", loaded)) == [3, 4]


def test_a_container_that_never_began_has_had_no_long_life() -> None:
    """containerd says 1970 of when it began: an image without the command, for one."""
    never = {"exitCode": 128, "reason": "StartError", "startedAt": "1970-01-01T00:00:00Z", "finishedAt": SOON}
    pictures = [lives(count, never, conditions=UNREADY_SOON) for count in (1, 2, 3)]
    assert in_a_row(*(("a", picture) for picture in pictures)) == [1, 2, 3]


def test_deaths_of_before_a_long_life_are_not_told_when_it_ends_in_silence() -> None:
    hangs = lives(3, OOM, conditions=UNREADY_LATE)
    assert in_a_row(("a", lives(3, OOM)), ("a", hangs)) == [3, 0]
    assert told(hangs) == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("\x1b[1;31mRuntimeError\x1b[0m: no memory", "RuntimeError: no memory"),
        ("\x1b]0;owned\x07x\x00y\u202ez", "]0;owned x y z"),
        ("step 1\rstep 2\x85step 3", "step 1 | step 2 | step 3"),
    ],
    ids=["colours", "what a terminal obeys", "other ends of a line"],
)
def test_a_log_or_a_registry_can_say_nothing_that_a_terminal_obeys(words: str, says: str) -> None:
    """`pdcluster explain` prints it as it is."""
    assert told(status(container(restarts=1, last={**ERROR, "message": words}))).endswith(f": {says}")
    assert told(status(waits("CreateContainerError", words))).endswith(f": {says}")
