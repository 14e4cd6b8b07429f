"""``GET /pdcluster/requests?id=ID``: what this router remembers of a request, for ``pdcluster why`` and for ``curl``.

Requests that run are asked how far they are; a request that has ended is looked for in memory.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import Any, Final

import msgspec

from pdcluster_protocol.kept import MAX_FOUND, KeptAnswer, KeptRequest, names_for
from pdcluster_router.core.telemetry.why import explained
from pdcluster_router.front.router import Router
from pdcluster_router.requests.unserved import waiting
from pdcluster_router.telemetry.kept import request_of

QUERY: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": "id",
            "in": "query",
            "required": True,
            "schema": {"type": "string"},
            "description": "`x-request-id` of the answer, or a transfer id; an answer's own `id` does as well",
        }
    ]
}


def answer_about(router: Router, name: str) -> bytes:
    """The page's body, JSON."""
    found = next(filter(None, (_found(router, one) for one in names_for(name))), [])
    told = tuple(map(explained, found))
    names = {moment.engine for request in told for moment in request.moments}
    engines = {
        engine.name: engine.pod or engine.url for engine in router.services.all_engines() if engine.name in names
    }
    return msgspec.json.encode(KeptAnswer(requests=told, engines=engines, since_unix_s=router.services.kept.since()))


def _found(router: Router, name: str) -> list[KeptRequest]:
    """Requests in the queue first, then those that run, then those that have ended."""
    services = router.services
    queued = (waiting(services, request) for request in router.gate.waiting_with(name))
    records = chain(services.divided, (one.record for one in services.running))
    running = (record.row() for record in records if name in record.names)
    return [*map(request_of, islice(chain(queued, running), MAX_FOUND)), *services.kept.find(name)]
