"""``GET /pdcluster/pool``: every engine as this router sees it, its requests and its failures, for people and tests."""

from __future__ import annotations

from pdcluster_protocol.labels import Role
from pdcluster_protocol.pool_page import DiscoveryStatus, EngineRow, PoolPage, RecentFailures, Requests, RevisionRow
from pdcluster_router.core.engines.breaker import FIRST_ERA
from pdcluster_router.core.engines.membership import EngineState
from pdcluster_router.core.engines.placement import decode_tiers
from pdcluster_router.engines.engine import Engine
from pdcluster_router.services import Services
from pdcluster_router.telemetry.failures import RECENT_S


def describe_pool(services: Services) -> PoolPage:
    """The page's content. Costs a look at every engine."""
    engines = services.all_engines()
    failures = {kind.value: num for kind, num in services.failures.recent().items()}
    return PoolPage(
        discovery=_discovery(services),
        policy=services.settings.policy.value,
        requests=_requests(services),
        failures=RecentFailures(RECENT_S, failures),
        revisions=[_revision(revision, engines) for revision in sorted({engine.revision for engine in engines})],
        engines=[_engine(engine, services) for engine in engines],
        ended={outcome.value: num for outcome, num in services.metrics.num_ended.items() if num},
    )


def _requests(services: Services) -> Requests:
    sum_of = services.admissions.sum_of
    return Requests(
        running=len(services.running),
        queued={role.value: sum_of(role, lambda one: one.num_queued) for role in Role},
        backlog_tokens={role.value: sum_of(role, lambda one: one.backlog_tokens) for role in Role},
    )


def _discovery(services: Services) -> DiscoveryStatus:
    discovery = services.discovery
    kind = services.settings.discovery.value
    if (file := services.engine_file) is not None:
        return DiscoveryStatus(kind, file.is_current, file.reason)
    if discovery is None:
        return DiscoveryStatus(kind)
    return DiscoveryStatus(kind, discovery.is_current, discovery.reason, sorted(discovery.problems))


def _revision(revision: str, engines: list[Engine]) -> RevisionRow:
    serving = [engine for engine in engines if engine.state is EngineState.SERVING]
    ours = [engine for engine in serving if engine.revision == revision]
    counts = {role.value: sum(engine.role is role for engine in ours) for role in Role}
    tiers = decode_tiers(engines)
    used = {engine.revision for engine in tiers[0]} if tiers else set()
    return RevisionRow(revision, counts, serves=revision in used)


def _engine(engine: Engine, services: Services) -> EngineRow:
    breaker, now = engine.breaker, services.now()
    last_s, last = services.failures.last_of(engine.name) or (None, "")
    return EngineRow(
        name=engine.name,
        role=engine.role.value,
        url=engine.url,
        pod=engine.pod,
        revision=engine.revision,
        state=engine.state.value,
        healthy=engine.is_healthy,
        circuit=breaker.circuit.value,
        ejected_s=round(max(0.0, breaker.until - now), 1) if breaker.is_ejected else 0.0,
        running=engine.num_running,
        outstanding_tokens=engine.load.outstanding_tokens,
        slow_start_s=round(engine.load.slow_start_s(now=now), 1),
        ejections=breaker.era - FIRST_ERA,
        last_failure=last,
        last_failure_s=None if last_s is None else round(last_s, 1),
    )
