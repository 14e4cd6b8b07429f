"""``GET /pdcluster/pool``: every engine as this router sees it, its requests and its failures, for people and tests."""

from __future__ import annotations

from typing import Final

from pdcluster_protocol.labels import Role
from pdcluster_router.core.membership import EngineState
from pdcluster_router.core.placement import serving_revisions
from pdcluster_router.engines.engine import Engine
from pdcluster_router.services import Services
from pdcluster_router.telemetry.failures import RECENT_S

POOL_PATH: Final = "/pdcluster/pool"


def describe_pool(services: Services) -> dict[str, object]:
    """The page's content. Costs a look at every engine."""
    engines = services.all_engines()
    revisions = sorted({engine.revision for engine in engines})
    return {
        "discovery": _discovery(services),
        "policy": services.settings.policy.value,
        "requests": _requests(services),
        "failures": {
            "seconds": RECENT_S,
            "kinds": {kind.value: num for kind, num in services.failures.recent().items()},
        },
        "revisions": [_revision(revision, engines) for revision in revisions],
        "engines": [_engine(engine, services.now()) for engine in engines],
    }


def _requests(services: Services) -> dict[str, object]:
    """Those of this router. ``queued`` and ``backlog_tokens``: by the role that is to prefill them."""
    admissions = services.admissions.items()
    return {
        "running": len(services.running),
        "queued": {role.value: admission.num_queued for role, admission in admissions},
        "backlog_tokens": {role.value: admission.backlog_tokens for role, admission in admissions},
    }


def _discovery(services: Services) -> dict[str, object]:
    discovery = services.discovery
    kind = services.settings.discovery.value
    if discovery is None:
        return {"kind": kind}
    return {
        "kind": kind,
        "is_current": discovery.is_current,
        "reason": discovery.reason,
        "unusable_slices": sorted(discovery.problems),
    }


def _revision(revision: str, engines: list[Engine]) -> dict[str, object]:
    """``serves``: whether it gets new requests."""
    serving = [engine for engine in engines if engine.revision == revision and engine.state is EngineState.SERVING]
    counts = {role.value: sum(engine.role is role for engine in serving) for role in Role}
    return {"revision": revision, "serving": counts, "serves": revision in serving_revisions(serving)}


def _engine(engine: Engine, now: float) -> dict[str, object]:
    """``ejected_s``: seconds until it may be asked again, 0 when it may."""
    breaker = engine.breaker
    return {
        "name": engine.name,
        "role": engine.role.value,
        "url": engine.url,
        "pod": engine.pod,
        "revision": engine.revision,
        "state": engine.state.value,
        "healthy": engine.is_healthy,
        "circuit": breaker.circuit.value,
        "ejected_s": round(max(0.0, breaker.until - now), 1) if breaker.is_ejected else 0.0,
        "running": engine.num_running,
        "outstanding_tokens": engine.load.outstanding_tokens,
    }
