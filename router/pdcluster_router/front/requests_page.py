"""``GET /pdcluster/requests?id=ID``: what this router remembers of a request, for ``pdcluster why`` and for ``curl``.

Running requests report how far they are; requests that have ended are looked up in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pdcluster_protocol.kept import MAX_FOUND, MAX_LINES_AHEAD, KeptAnswer, KeptRequest, LineAhead, names_for
from pdcluster_protocol.labels import Role
from pdcluster_router.core.clients.turn_log import MAX_LOOKED_AT
from pdcluster_router.core.telemetry.why import explained, explained_by, furthest_behind
from pdcluster_router.front.router import Router
from pdcluster_router.requests.unserved import waiting
from pdcluster_router.services import Services
from pdcluster_router.telemetry.kept import KeptRow, request_of, with_alias

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
    told = tuple(with_its_alias(router.services, with_lines(router.services, request)) for request in found)
    names = {moment.engine for request in told for moment in request.moments}
    engines = {
        engine.name: engine.pod or engine.url for engine in router.services.all_engines() if engine.name in names
    }
    return msgspec.json.encode(KeptAnswer(requests=told, engines=engines, since_unix_s=router.services.kept.since()))


def with_its_alias(services: Services, request: KeptRequest) -> KeptRequest:
    """``request`` with the model that its client's name stands for, unless names have changed since it came."""
    terms = services.model_terms
    came_at = (request.ended_at_unix_s or services.unix_now()) - (request.total_s or 0.0)
    return with_alias(request, terms.aliases) if came_at >= terms.aliases_since_unix_s else request


def with_lines(services: Services, request: KeptRequest, most: int = MAX_LOOKED_AT) -> KeptRequest:
    """``request`` with the keys whose requests were ahead. Costs a look at each of the last ``most`` of those."""
    ahead = request.ahead
    if ahead is None or not ahead.num_requests:
        return request
    pair = services.admissions.find(ahead.model)
    if pair is None:
        return request
    log, end = pair[Role(ahead.queue)].turn_log, ahead.first_turn + ahead.num_requests
    lines = log.between(end - min(most, ahead.num_requests), end)
    told = tuple(LineAhead(line.name, line.num_requests, line.num_tokens) for line in lines[:MAX_LINES_AHEAD])
    num_known, num_others = sum(line.num_requests for line in lines), len(lines) - len(told)
    return replace(request, ahead=replace(ahead, num_known=num_known, lines=told, num_other_keys=num_others))


def _found(router: Router, name: str) -> list[KeptRequest]:
    """Requests in the queue, then requests that run, then requests that have ended; each with its cause and cure."""
    services = router.services
    queued = (waiting(services, request) for request in router.gate.waiting_with(name))
    records = chain(services.divided, (one.record for one in services.running))
    running = ((one.row(), one.unanswered()) for one in records if name in one.names)
    going = islice(chain(((row, ()) for row in queued), running), MAX_FOUND)
    return [*(_explained_row(row, parts) for row, parts in going), *map(explained, services.kept.find(name))]


def _explained_row(row: KeptRow, parts: Sequence[KeptRow]) -> KeptRequest:
    """``parts``: those that the request waits for."""
    request, slowest = request_of(row), furthest_behind(map(request_of, parts))
    return explained(request) if slowest is None else explained_by(request, slowest)
