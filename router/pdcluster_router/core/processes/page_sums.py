"""Adds up the pages of several processes of one router: the pool, the last requests, and what is known of one request.

The page of the process that was asked comes first in each list. It says how the router finds engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from pdcluster_protocol.kept import MAX_FOUND, KeptAnswer
from pdcluster_protocol.pool_page import DiscoveryStatus, EngineRow, PoolPage, RecentFailures, Requests, RevisionRow
from pdcluster_protocol.status_page import StatusPage

_CIRCUITS: Final = ("closed", "trying", "half_open", "ejected")
"""From the best to the worst."""


def joined_answers(answers: Sequence[KeptAnswer]) -> KeptAnswer:
    """The requests with one id that any process remembers, the newest first."""
    requests = [request for answer in answers for request in answer.requests]
    requests.sort(key=lambda one: -(one.ended_at_unix_s or float("inf")))
    since: dict[str, float] = {}
    for answer in answers:
        for fate, at_unix_s in answer.since_unix_s.items():
            since[fate] = max(at_unix_s, since.get(fate, at_unix_s))
    engines = {name: engine for answer in reversed(answers) for name, engine in answer.engines.items()}
    return KeptAnswer(requests=tuple(requests[:MAX_FOUND]), engines=engines, since_unix_s=since)


def joined_status(pages: Sequence[StatusPage], most: Mapping[str, int]) -> StatusPage:
    """The pool, and the last requests of all processes. ``most``: by fate, how many a page shows."""
    recent = sorted((one for page in pages for one in page.recent), key=attrgetter("ended_s"))
    by_fate = {fate: [one for one in recent if one.fate == fate][:num] for fate, num in most.items()}
    shown = sorted((one for some in by_fate.values() for one in some), key=attrgetter("ended_s"))
    return StatusPage(pool=joined_pools([page.pool for page in pages]), recent=tuple(shown))


def joined_pools(pools: Sequence[PoolPage]) -> PoolPage:
    """The pool with the requests of all processes."""
    first = pools[0]
    return PoolPage(
        discovery=_discovery([pool.discovery for pool in pools]),
        policy=first.policy,
        requests=_requests([pool.requests for pool in pools]),
        failures=RecentFailures(first.failures.seconds, _sums(pool.failures.kinds for pool in pools)),
        revisions=_revisions(row for pool in pools for row in pool.revisions),
        engines=_engines(row for pool in pools for row in pool.engines),
        ended=_sums(pool.ended for pool in pools),
    )


def _sums(some: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in some:
        total.update(one)
    return dict(total)


def _discovery(all_: Sequence[DiscoveryStatus]) -> DiscoveryStatus:
    """That of a process that does not get changes, if there is one; else the first."""
    return next((one for one in all_ if one.is_current is False), all_[0])


def _requests(all_: Sequence[Requests]) -> Requests:
    return Requests(
        running=sum(one.running for one in all_),
        queued=_sums(one.queued for one in all_),
        backlog_tokens=_sums(one.backlog_tokens for one in all_),
    )


def _revisions(rows: Iterable[RevisionRow]) -> list[RevisionRow]:
    known: dict[str, RevisionRow] = {}
    for row in rows:
        one = known.setdefault(row.revision, row)
        serving = {role: max(num, one.serving.get(role, 0)) for role, num in row.serving.items()}
        known[row.revision] = RevisionRow(row.revision, serving, serves=one.serves or row.serves)
    return [known[name] for name in sorted(known)]


def _engines(rows: Iterable[EngineRow]) -> list[EngineRow]:
    """Each engine once, in the order of the first page."""
    by_engine: dict[tuple[str, str, str, str], list[EngineRow]] = {}
    for row in rows:
        by_engine.setdefault((row.role, row.url, row.revision, row.pod), []).append(row)
    return [_engine(some) for some in by_engine.values()]


def _engine(rows: Sequence[EngineRow]) -> EngineRow:
    newest = min(rows, key=lambda row: float("inf") if row.last_failure_s is None else row.last_failure_s)
    return replace(
        rows[0],
        healthy=all(row.healthy for row in rows),
        circuit=max((row.circuit for row in rows), key=_badness),
        ejected_s=max(row.ejected_s for row in rows),
        running=sum(row.running for row in rows),
        outstanding_tokens=sum(row.outstanding_tokens for row in rows),
        slow_start_s=max(row.slow_start_s for row in rows),
        ejections=sum(row.ejections for row in rows),
        last_failure=newest.last_failure,
        last_failure_s=newest.last_failure_s,
    )


def _badness(circuit: str) -> int:
    return _CIRCUITS.index(circuit) if circuit in _CIRCUITS else len(_CIRCUITS)
