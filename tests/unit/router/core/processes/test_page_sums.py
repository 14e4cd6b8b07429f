"""The pages of several processes, added up."""

from __future__ import annotations

from msgspec.structs import replace

from pdcluster_protocol.kept import MAX_FOUND, KeptAnswer, KeptRequest
from pdcluster_protocol.pool_page import DiscoveryStatus, EngineRow, PoolPage, RecentFailures, Requests, RevisionRow
from pdcluster_protocol.status_page import RecentRequest, StatusPage
from pdcluster_router.core.processes.page_sums import joined_answers, joined_pools, joined_status

ENGINE = EngineRow(
    name="decode-0",
    role="decode",
    url="http://a:1",
    pod="p",
    revision="r",
    state="serving",
    healthy=True,
    circuit="closed",
    ejected_s=0.0,
    running=1,
    outstanding_tokens=10,
)
POOL = PoolPage(
    discovery=DiscoveryStatus("static"),
    policy="affinity",
    requests=Requests(running=2, queued={"prefill": 1, "decode": 0}, backlog_tokens={"prefill": 5, "decode": 0}),
    failures=RecentFailures(300.0, {"draining": 1}),
    revisions=[RevisionRow("r", {"prefill": 1, "decode": 2}, serves=False)],
    engines=[ENGINE],
    ended={"ok": 3},
)


def test_the_pool_of_one_process_stays_as_it_is() -> None:
    assert joined_pools([POOL]) == POOL


def test_requests_failures_and_ends_are_added() -> None:
    pool = joined_pools([POOL, replace(POOL, ended={"lost": 1}, failures=RecentFailures(300.0, {"no_room": 2}))])
    assert pool.requests == Requests(4, {"prefill": 2, "decode": 0}, {"prefill": 10, "decode": 0})
    assert pool.failures.kinds == {"draining": 1, "no_room": 2}
    assert pool.ended == {"ok": 3, "lost": 1}


def test_an_engine_is_as_bad_as_any_process_finds_it() -> None:
    failing = replace(
        ENGINE,
        healthy=False,
        circuit="ejected",
        ejected_s=4.0,
        running=3,
        outstanding_tokens=7,
        slow_start_s=2.0,
        ejections=2,
        last_failure="connect: refused",
        last_failure_s=1.5,
    )
    old = replace(ENGINE, last_failure="old", last_failure_s=90.0, ejections=1)
    [engine] = joined_pools([replace(POOL, engines=[one]) for one in (old, failing, ENGINE)]).engines
    assert engine == replace(failing, running=5, outstanding_tokens=27, ejections=3)


def test_an_engine_that_only_another_process_knows_is_shown() -> None:
    other = replace(ENGINE, url="http://b:1", name="decode-1")
    pool = joined_pools([POOL, replace(POOL, engines=[other, ENGINE])])
    assert [(one.name, one.running) for one in pool.engines] == [("decode-0", 2), ("decode-1", 1)]


def test_a_revision_serves_if_it_does_so_in_any_process() -> None:
    others = [RevisionRow("r", {"prefill": 2, "decode": 1}, serves=True), RevisionRow("a", {}, serves=False)]
    pool = joined_pools([POOL, replace(POOL, revisions=others)])
    assert pool.revisions == [
        RevisionRow("a", {}, serves=False),
        RevisionRow("r", {"prefill": 2, "decode": 2}, serves=True),
    ]


def test_one_process_that_hears_of_no_changes_is_told() -> None:
    cut_off = DiscoveryStatus("kubernetes", is_current=False, reason="403", unusable_slices=[])
    well = DiscoveryStatus("kubernetes", is_current=True, reason="", unusable_slices=[])
    pool = joined_pools([replace(POOL, discovery=one) for one in (well, cut_off)])
    assert pool.discovery == cut_off


def test_the_last_requests_are_the_last_ones_of_all() -> None:
    def page(*ended_s: float) -> StatusPage:
        recent = [
            RecentRequest(request_id=str(one), ended_s=one, fate="failed" if one < 1 else "served") for one in ended_s
        ]
        return StatusPage(pool=POOL, recent=tuple(recent))

    joined = joined_status([page(0.5, 2.0, 6.0), page(0.1, 0.2, 1.0, 3.0)], {"served": 3, "failed": 2, "refused": 1})
    assert [one.ended_s for one in joined.recent] == [0.1, 0.2, 1.0, 2.0, 3.0]
    assert joined.pool.requests.running == 4


def test_the_requests_with_an_id_are_those_of_all_and_running_ones_come_first() -> None:
    def request(name: str, ended_at_unix_s: float | None) -> KeptRequest:
        return KeptRequest(request_id=name, ended_at_unix_s=ended_at_unix_s)

    answers = [
        KeptAnswer(
            requests=(request("b", 20.0),), engines={"decode-0": "p"}, since_unix_s={"served": 5.0, "failed": 1.0}
        ),
        KeptAnswer(
            requests=(request("a", None), request("c", 10.0)), engines={"decode-1": "q"}, since_unix_s={"served": 9.0}
        ),
    ]
    joined = joined_answers(answers)
    assert [one.request_id for one in joined.requests] == ["a", "b", "c"]
    assert joined.engines == {"decode-0": "p", "decode-1": "q"}
    assert joined.since_unix_s == {"served": 9.0, "failed": 1.0}
    many = KeptAnswer(requests=tuple(request(str(at), float(at)) for at in range(MAX_FOUND)))
    assert len(joined_answers([many, many]).requests) == MAX_FOUND
