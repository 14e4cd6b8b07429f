"""All paths that are not hot: one FastAPI application for each port. Errors have the shape of the path's API.

    client port     /v1/...  /tokenize  /detokenize  /version      for clients, with a key if the router has keys
                    /health  /docs  /openapi.json                  for probes and browsers, without a key
    internal port   /v1/metaserver  /metrics  /pdcluster/...  /status  /  /health  /docs   engines, operator, monitoring

A POST to a hot path never reaches these applications: ``RouterProtocol`` answers it. These applications refuse the
other methods of the hot paths.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Final, TypeAlias

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from pdcluster_protocol.errors import Unavailable
from pdcluster_protocol.kept import REQUESTS_PATH
from pdcluster_protocol.labels import Role
from pdcluster_protocol.metaserver import METASERVER_PATH
from pdcluster_protocol.pool_page import POOL_PATH
from pdcluster_protocol.secret import Secret
from pdcluster_protocol.status_page import STATUS_PAGE_PATH, STATUS_PATH
from pdcluster_protocol.verify import VERIFY_PATH
from pdcluster_router.core.apis.client_apis import REQUEST_PATHS, api_of
from pdcluster_router.core.apis.openai_errors import (
    ApiError,
    RefusedRequest,
    answer_too_large,
    bad_request,
    draining,
    method_not_allowed,
    no_engine,
    not_found,
    not_ready,
    responses_not_stored,
)
from pdcluster_router.engines.health import Probes, missing_engines
from pdcluster_router.front.docs_page import DOCS_PATH, add_docs
from pdcluster_router.front.pages import LoggedPages, page_of, tell_error
from pdcluster_router.front.pass_on import QUESTIONS, VERSION, pass_on
from pdcluster_router.front.picker.start import running_picker
from pdcluster_router.front.requests_page import QUERY
from pdcluster_router.front.router import Router
from pdcluster_router.front.server_protocol import ROUTER_STATE
from pdcluster_router.front.sibling_pages import beside_siblings, metrics, pool, requests_named, status
from pdcluster_router.front.status_page import DOCUMENT_HEADERS, PAGE, PAGE_HEADERS
from pdcluster_router.front.tokens.start import running_key_server
from pdcluster_router.front.verify_page import RESPONSES, SCHEMA, carry_out
from pdcluster_router.http.answers import Fetched
from pdcluster_router.processes.seat import Seat, internal_ports
from pdcluster_router.services import Services
from pdcluster_router.settings.router_settings import Settings
from pdcluster_router.telemetry.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[Mapping[str, Router]]]
START_S: Final = 5.0
"""The most that the first look at the pool may take. A kubelet waits longer before it restarts a container."""
_JSON = "application/json"
_NO_PAGES: Final[dict[str, Any]] = {"docs_url": None, "redoc_url": None}
"""No pages of FastAPI's own: they load scripts from a public network."""
_STORED_RESPONSES = "/v1/responses/{rest:path}"
_NOT_POST = ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"]


class TwoPorts:
    """The ASGI application of both ports: each request is served by the application of its port."""

    def __init__(self, client: FastAPI, internal: FastAPI, internal_ports: Container[int | None]) -> None:
        """``client``: its lifespan serves both ports."""
        self._client = LoggedPages(client)
        self._internal = internal
        self._internal_ports = internal_ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_internal = scope["type"] == "http" and scope["server"][1] in self._internal_ports
        await (self._internal if is_internal else self._client)(scope, receive, send)


def build_app(settings: Settings, secret: Secret, seat: Seat | None = None) -> TwoPorts:
    """The application of both ports, which are bound already. Its lifespan makes the router, also for the protocol."""
    lifespan = _lifespan(settings, secret, seat)
    return TwoPorts(_client_app(lifespan), _internal_app(), internal_ports(settings.internal_port, seat))


def _client_app(lifespan: Lifespan) -> FastAPI:
    app = FastAPI(title="pdcluster router", description=_FOR_CLIENTS, lifespan=lifespan, **_NO_PAGES)
    add_docs(app)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _has_left)
    app.middleware("http")(_require_key)
    _add_health(app)
    app.get("/v1/models", tags=["OpenAI"])(read_models)
    app.head("/v1/models", include_in_schema=False)(read_models)
    for question in QUESTIONS:
        app.post(question, tags=["vLLM"])(ask_an_engine)
    app.get(VERSION, tags=["vLLM"])(ask_an_engine)
    app.api_route(_STORED_RESPONSES, methods=[*_NOT_POST, "POST"], include_in_schema=False)(refuse_stored)
    for path in sorted(map(bytes.decode, REQUEST_PATHS)):
        app.api_route(path, methods=_NOT_POST, include_in_schema=False)(refuse_method)
    return app


def _internal_app() -> FastAPI:
    app = FastAPI(title="pdcluster router, internal port", description=_FOR_THE_CLUSTER, **_NO_PAGES)
    add_docs(app)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _has_left)
    _add_health(app)
    app.get("/", tags=["router"])(read_overview)
    app.head("/", include_in_schema=False)(read_overview)
    app.get("/metrics", tags=["router"])(read_metrics)
    app.get(POOL_PATH, tags=["router"])(read_pool)
    app.get(STATUS_PATH, tags=["router"])(read_status)
    app.get(STATUS_PAGE_PATH, tags=["router"])(read_status_page)
    app.head(STATUS_PAGE_PATH, include_in_schema=False)(read_status_page)
    app.get(REQUESTS_PATH, tags=["router"], openapi_extra=QUERY)(read_requests)
    app.post(VERIFY_PATH, tags=["router"], openapi_extra=SCHEMA, responses=RESPONSES)(verify_pair)
    app.api_route(METASERVER_PATH, methods=_NOT_POST, include_in_schema=False)(refuse_method)
    return app


def _add_health(app: FastAPI) -> None:
    app.get("/health", tags=["router"])(read_health)
    app.head("/health", include_in_schema=False)(read_health)


_FOR_CLIENTS = (
    "One endpoint in front of prefill and decode engines: `POST /v1/chat/completions`, `POST /v1/completions`, "
    "`POST /v1/responses` and Anthropic's `POST /v1/messages` as with vLLM. "
    "Pooling models have their paths too, as `POST /v1/embeddings`."
)
_FOR_THE_CLUSTER = "For engines, the operator and monitoring. Clients have a port of their own."
_WITHOUT_KEY = frozenset({"/health", DOCS_PATH, "/openapi.json"})
"""Paths for probes and browsers: they tell of the pool only whether it is ready."""


async def _require_key(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    if request.scope["path"] not in _WITHOUT_KEY:
        admitted = _router(request).access.admit(request.headers.raw)
        if not isinstance(admitted, str):
            return _error(request, admitted)
        page_of(request).client = admitted
    return await call_next(request)


async def read_overview(request: Request) -> dict[str, object]:
    """The engines that this router knows, and the number of requests that run."""
    page = await pool(_router(request))
    engines = [{"name": one.name, "role": one.role, "url": one.url, "healthy": one.healthy} for one in page.engines]
    return {"service": "pdcluster router", "engines": engines, "in_flight": page.requests.running}


async def read_health(request: Request) -> Response:
    """200 when a prefill and a decode engine of one revision are healthy, and the keys of clients' tokens are known;
    otherwise 503 and what is missing."""
    router = _router(request)
    if router.is_draining:
        return _error(request, draining())
    if problem := missing_engines(router.services.roster) or router.access.problem:
        return _error(request, not_ready(problem))
    return Response(b'{"status":"ok"}', media_type=_JSON)


async def read_metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(await metrics(_router(request)), media_type=CONTENT_TYPE)


async def read_pool(request: Request) -> Response:
    """Every engine with its revision and state, which revisions get work, and whether changes reach this router."""
    return Response(msgspec.json.encode(await pool(_router(request))), media_type=_JSON)


async def read_status(request: Request) -> Response:
    """The pool's page, and the steps of the last requests: the document that `/status` draws."""
    return Response(await status(_router(request)), media_type=_JSON, headers=DOCUMENT_HEADERS)


async def read_status_page(_request: Request) -> Response:
    """A page for browsers: engines, queues, failures, and where the last requests' time went."""
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)


async def read_requests(request: Request) -> Response:
    """A request as this router remembers it: its steps and their times, how it ended, and why."""
    return Response(await requests_named(_router(request), request.query_params.get("id", "")), media_type=_JSON)


async def verify_pair(request: Request) -> Response:
    """Proves that a pair of this revision hands KV over, with one real request. Needs a pass made with the secret."""
    try:
        return Response(await carry_out(_router(request), request), media_type=_JSON)
    except RefusedRequest as refused:
        return _error(request, refused.error)


async def read_models(request: Request) -> Response:
    """The list of a decode engine; or one list of all models, if the engines' lists differ."""
    line = _router(request).access.line_for_engines(request.headers.raw)
    try:
        answer = await _router(request).models.read(line)
    except Unavailable as error:
        return _error(request, no_engine("decode", str(error)))
    return _fetched(request, answer)


async def ask_an_engine(request: Request) -> Response:
    """A decode engine's own answer: see vLLM's documentation."""
    try:
        return _fetched(request, await pass_on(_router(request), request))
    except RefusedRequest as refused:
        return _error(request, refused.error)


async def refuse_stored(request: Request) -> Response:
    """Refuses questions about stored responses; decision 0058 says why."""
    return _error(request, responses_not_stored())


async def refuse_method(request: Request) -> Response:
    """The hot paths take POST only."""
    return _error(request, method_not_allowed(request.method, request.scope["path"]), {"allow": "POST"})


def _lifespan(settings: Settings, secret: Secret, seat: Seat | None) -> Lifespan:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Router]]:
        router = Router(settings, secret, seat)
        num_prefill, num_decode = (len(router.services.engines[role]) for role in (Role.PREFILL, Role.DECODE))
        folder = None if seat is None else seat.folder
        logger.info("router started prefill_engines=%d decode_engines=%d", num_prefill, num_decode)
        try:
            async with (
                asyncio.TaskGroup() as tasks,
                _watching(tasks, router),
                running_key_server(router.access.tokens, settings, router.services, folder),
                running_picker(router),
                beside_siblings(router, seat),
            ):
                yield {ROUTER_STATE: router}
        finally:
            await router.close()

    return lifespan


@asynccontextmanager
async def _watching(tasks: asyncio.TaskGroup, router: Router) -> AsyncIterator[None]:
    """Watches engines, their EndpointSlices, and the files of keys, certificates and engines until the context ends."""
    services = router.services
    probes = Probes(tasks, services.roster, lambda: services.settings, router.access.engine_line)
    services.on_pool_change(probes.match_roster)
    probes.match_roster()
    watching = [tasks.create_task(watch.run(), name="router: files") for watch in router.watches]
    if services.discovery is not None:
        watching.append(tasks.create_task(services.discovery.run(), name="router: discovery"))
    await _first_look(services, probes)
    yield
    for task in watching:
        task.cancel()
    probes.stop()


async def _first_look(services: Services, probes: Probes) -> None:
    """Waits until the engines are known and each was probed, for ``START_S`` at most. Requests wait in the sockets
    meanwhile: a Service sends some as soon as a restarted router listens."""
    with suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            if services.discovery is not None:
                await services.discovery.has_listed.wait()
            await probes.has_asked_all()


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 404:
        return _error(request, not_found(request.scope["path"]))
    if exc.status_code == 405:
        return _error(request, method_not_allowed(request.method, request.scope["path"]), exc.headers)
    return _error(request, bad_request(str(exc.detail)), exc.headers)


async def _has_left(_request: Request, _exc: Exception) -> Response:
    """A client that left before its body was whole gets no answer. Without this handler each such client would put a
    traceback into the log."""
    return Response(status_code=400)


def _router(request: Request) -> Router:
    router: Router = getattr(request.state, ROUTER_STATE)
    return router


def _fetched(request: Request, answer: Fetched) -> Response:
    """The engine's answer, up to 16 MiB, if there is room for it until the client has taken it.

    ``_require_key`` sends an empty last message behind the body, and uvicorn 0.54's ``RequestResponseCycle.send`` waits
    with that until the client has taken what was written.
    """
    router, page = _router(request), page_of(request)
    num_bytes, most = len(answer.body) if request.method != "HEAD" else 0, router.room.max_bytes // 2
    if num_bytes > most:
        return _error(request, answer_too_large(num_bytes, most))
    holder = page.client if router.access.keys is not None and router.access.keys.are_several else ""
    if not page.hold(num_bytes, holder):
        return _error(request, router.no_room())
    page.is_engines_answer = True
    return Response(answer.body, answer.head.status, media_type=answer.head.content_type.decode("latin-1"))


def _error(request: Request, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    tell_error(request, error)
    body = api_of(request.scope["path"].encode()).error_body(error)
    return Response(body, error.status, headers={**(headers or {}), **error.headers}, media_type=_JSON)
