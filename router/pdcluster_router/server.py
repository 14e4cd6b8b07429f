"""The process around the router: socket, uvicorn, signals, a graceful stop within a limit.

SIGTERM --> no new requests (503), running ones go on up to drain_timeout_s --> the rest gets an error
        --> connections close --> the application's lifespan ends: no task, no connection to an engine is left
"""

from __future__ import annotations

import resource
import socket
from types import FrameType

import uvicorn

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.secret import Secret
from pdcluster_router.app import build_app
from pdcluster_router.protocol import ROUTER_STATE, RouterProtocol
from pdcluster_router.router import Router
from pdcluster_router.settings import Settings
from pdcluster_router.trace import TraceFile

_BACKLOG = 2048
_CLOSE_TIMEOUT_S = 2


class RouterServer(uvicorn.Server):
    """uvicorn, with a router that is drained before connections are closed.

    While it drains the port stays open: decode engines must still reach the metaserver for requests that run.
    """

    def __init__(self, settings: Settings, secret: Secret) -> None:
        super().__init__(_uvicorn_config(settings, secret))
        self._settings = settings

    @property
    def router(self) -> Router:
        """The running router. Only between start-up and shutdown."""
        router: Router = self.lifespan.state[ROUTER_STATE]
        return router

    async def start(self, sockets: list[socket.socket]) -> None:
        """The router answers. For whoever runs the event loop: no signals are handled."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """The first signal drains, another one does not wait. Not raised again, as uvicorn would: we end with 0."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.router.drain()
        await self.router.wait_until_idle(self._settings.drain_timeout_s, lambda: self.force_exit)
        await super().shutdown(sockets=sockets)


def listen(settings: Settings) -> tuple[socket.socket, Settings]:
    """A bound socket, and the settings with the port that it really has.

    Raises:
        ConfigError: The port is taken, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        where = f"{settings.host}:{settings.port}"
        raise ConfigError(f"cannot listen on {where} ({error.strerror}): choose another --port or --host") from error
    bound.setblocking(False)
    return bound, settings.model_copy(update={"port": bound.getsockname()[1]})


def run(settings: Settings, secret: Secret) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: The port is taken, or the trace file cannot be written.
    """
    if settings.trace_file is not None:
        TraceFile(settings.trace_file).close()
    _raise_open_file_limit()
    bound, settings = listen(settings)
    print(f"router on http://{settings.host}:{settings.port}", flush=True)
    RouterServer(settings, secret).run(sockets=[bound])


def _uvicorn_config(settings: Settings, secret: Secret) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(settings, secret),
        http=RouterProtocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",  # Its lines of information name our address.
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(settings.client_idle_s) or 1,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        backlog=_BACKLOG,
    )


def _raise_open_file_limit() -> None:
    """As many sockets as the system lets us: a request holds up to four, and many systems start with 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
