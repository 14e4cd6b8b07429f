"""Everything that is not hot: FastAPI behind the same port. Models, health, metrics, docs, errors in OpenAI's shape.

The hot paths never reach this application (``protocol.RouterProtocol`` answers them); they appear here only
for the methods that they do not take.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
from anyio.abc import TaskGroup
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from pdcluster_protocol.errors import Unavailable
from pdcluster_protocol.secret import Secret
from pdcluster_router.core.openai_errors import (
    NO_DECODE,
    ApiError,
    RefusedRequest,
    bad_request,
    method_not_allowed,
    no_engine,
    not_found,
)
from pdcluster_router.engine import Engine
from pdcluster_router.health import Probes, health_of
from pdcluster_router.metrics import CONTENT_TYPE
from pdcluster_router.pool_page import POOL_PATH, describe_pool
from pdcluster_router.protocol import ROUTER_STATE
from pdcluster_router.router import HOT_PATHS, Router
from pdcluster_router.services import Services
from pdcluster_router.settings import Settings
from pdcluster_router.verify_page import RESPONSES, SCHEMA, VERIFY_PATH, carry_out

logger = logging.getLogger(__name__)

_JSON = "application/json"
_NOT_POST = ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"]
_MODELS_TIMEOUT_S = 10.0


def build_app(settings: Settings, secret: Secret) -> FastAPI:
    """The application. Its lifespan makes the router and hands it to the protocol."""
    app = FastAPI(title="pdcluster router", description=_DESCRIPTION, lifespan=_lifespan(settings, secret))
    app.add_exception_handler(HTTPException, _http_error)
    for path, endpoint in (("/", read_overview), ("/health", read_health)):
        app.get(path, tags=["router"])(endpoint)
        app.head(path, include_in_schema=False)(endpoint)
    app.get("/metrics", tags=["router"])(read_metrics)
    app.get(POOL_PATH, tags=["router"])(read_pool)
    app.post(VERIFY_PATH, tags=["router"], openapi_extra=SCHEMA, responses=RESPONSES)(verify_pair)
    app.get("/v1/models", tags=["OpenAI"])(read_models)
    for hot_path in sorted(HOT_PATHS):
        app.api_route(hot_path.decode(), methods=_NOT_POST, include_in_schema=False)(refuse_method)
    return app


_DESCRIPTION = (
    "One OpenAI endpoint in front of prefill and decode engines: "
    "`POST /v1/chat/completions` and `POST /v1/completions` as with vLLM."
)


async def read_overview(request: Request) -> dict[str, object]:
    """What this is, and which engines it knows."""
    router = _router(request)
    engines = [
        {"name": engine.name, "role": engine.role.value, "url": engine.url, "healthy": engine.is_healthy}
        for engine in router.services.all_engines()
    ]
    return {"service": "pdcluster router", "engines": engines, "in_flight": len(router.services.running)}


async def read_health(request: Request) -> Response:
    """200 when a prefill and a decode engine of one revision are well; otherwise 503 and who is missing."""
    router = _router(request)
    if router.is_draining:
        return _error(ApiError(503, "server_error", "draining", "this router is shutting down"))
    health = health_of(router.services)
    if not health.problem:
        return Response(b'{"status":"ok"}', media_type=_JSON)
    return _error(ApiError(503, "server_error", "not_ready", health.problem))


async def read_metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(_router(request).services.metrics.render(), media_type=CONTENT_TYPE)


async def read_pool(request: Request) -> dict[str, object]:
    """Every engine with its revision and state, which revisions get work, and whether changes reach this router."""
    return describe_pool(_router(request).services)


async def verify_pair(request: Request) -> Response:
    """Proves that a pair of this revision hands KV over, with one real request. Needs a pass made with the secret."""
    try:
        return Response(await carry_out(_router(request), request), media_type=_JSON)
    except RefusedRequest as refused:
        return _error(refused.error)


async def read_models(request: Request) -> Response:
    """A decode engine's own list."""
    services = _router(request).services
    authorization = request.headers.get("authorization")
    headers = [("authorization", authorization)] if authorization else []
    tried: list[Engine] = []
    reason = NO_DECODE
    while (engine := services.roster.place_decode(tried)) is not None:
        tried.append(engine)
        try:
            answer = await engine.fetch("/v1/models", timeout_s=_MODELS_TIMEOUT_S, headers=headers)
        except Unavailable as error:
            reason = str(error)
        else:
            return Response(answer.body, answer.head.status, media_type=answer.head.content_type.decode("latin-1"))
    return _error(no_engine("decode", reason))


async def refuse_method(request: Request) -> Response:
    """The hot paths take POST only."""
    return _error(method_not_allowed(request.method, request.url.path), {"allow": "POST"})


def _lifespan(
    settings: Settings, secret: Secret
) -> Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Router]]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Router]]:
        router = Router(settings, secret)
        num_prefill, num_decode = len(settings.prefill_urls), len(settings.decode_urls)
        logger.info("router started prefill_engines=%d decode_engines=%d", num_prefill, num_decode)
        try:
            async with anyio.create_task_group() as tasks:
                _start_watching(tasks, router.services)
                yield {ROUTER_STATE: router}
                tasks.cancel_scope.cancel()
        finally:
            await router.close()

    return lifespan


def _start_watching(tasks: TaskGroup, services: Services) -> None:
    probes = Probes(tasks, services)
    services.on_pool_change = probes.follow
    probes.follow()
    if services.discovery is not None:
        tasks.start_soon(services.discovery.run)


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 404:
        return _error(not_found(request.url.path))
    if exc.status_code == 405:
        return _error(method_not_allowed(request.method, request.url.path), exc.headers)
    return _error(bad_request(str(exc.detail)), exc.headers)


def _router(request: Request) -> Router:
    router: Router = getattr(request.state, ROUTER_STATE)
    return router


def _error(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    extra = dict(headers or {})
    if error.retry_after_s is not None:
        extra["retry-after"] = str(error.retry_after_s)
    return Response(error.body(), error.status, headers=extra, media_type=_JSON)
