"""The process around the router: sockets, uvicorn, signals, a graceful stop within a limit.

SIGTERM --> no new requests (503), running ones go on up to drain_timeout_s --> the rest gets an error
        --> connections close --> the application's lifespan ends: no task, no connection to an engine is left
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.launch import ProxyProtocol
from pdcluster_protocol.secret import Secret
from pdcluster_router.core.apis.openai_errors import ApiError, bad_request, no_room
from pdcluster_router.core.clients.proxy_protocol import Preface
from pdcluster_router.core.clients.room import RoomLimit, Unread
from pdcluster_router.core.engines.catalog import namesakes
from pdcluster_router.front.app import build_app
from pdcluster_router.front.certificates import Certificate
from pdcluster_router.front.clients import backlog
from pdcluster_router.front.picker.start import check_endpoints
from pdcluster_router.front.router import Router
from pdcluster_router.front.server_protocol import ROUTER_STATE, RouterProtocol
from pdcluster_router.front.setting_changes import SettingReader
from pdcluster_router.http.cycle import JSON
from pdcluster_router.http.handshakes import Counting, TlsPort
from pdcluster_router.http.prefaces import PrefacedConnection, PrefacePort
from pdcluster_router.http.tls import TlsConnection
from pdcluster_router.processes.keeper import LOOK_S
from pdcluster_router.processes.seat import Seat
from pdcluster_router.settings.forms import Discovery
from pdcluster_router.settings.router_settings import Settings
from pdcluster_router.settings.token_settings import is_url
from pdcluster_router.telemetry.failures import Failure, FailureKind

logger = logging.getLogger(__name__)

NewProtocol: TypeAlias = Callable[[Preface | None], asyncio.Protocol]
"""Makes the protocol of one connection from its PROXY header; None: the port requires no header."""
NewUnread: TypeAlias = Callable[[Any], Unread]
"""Makes the room for the bytes of an open connection that are not decrypted yet."""

_CLOSE_TIMEOUT_S = 2
_LEAVE_LOOK_S = 0.1
"""Seconds between two looks whether a process that leaves has ended."""


class RouterServer(uvicorn.Server):
    """uvicorn, with a router that is drained before connections are closed.

    While the router drains, its ports stay open: decode engines must reach the metaserver for requests that run.
    """

    def __init__(
        self, settings: Settings, secret: Secret, reader: SettingReader | None = None, seat: Seat | None = None
    ) -> None:
        """``reader``: of the settings, which SIGHUP has read anew; None: they stay. ``seat``: of this process, if it is
        one of several."""
        super().__init__(_uvicorn_config(settings, secret, seat))
        self._settings = settings
        self._reader = reader
        self._seat = seat

    @property
    def router(self) -> Router:
        """The running router. Only between start-up and shutdown."""
        router: Router = self.lifespan.state[ROUTER_STATE]
        return router

    async def start(self, sockets: list[socket.socket]) -> None:
        """Starts the router, which answers from now on. For a caller that runs the event loop: handles no signals."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """The first signal drains, another one ends the wait. uvicorn would then raise it; we exit with 0.

        With a seat only SIGINT ends the wait, which the keeper sends: systemd sends SIGTERM to all, as the keeper does.
        """
        self.force_exit = self.should_exit and (self._seat is None or sig == signal.SIGINT)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, for the two sockets of ``listen``, or the three of a seat: of the client port, of the port at
        which engines call this process, and of the internal port that all processes have in common.

        Raises:
            ConfigError: An alias is the name of a base model that a named engine lists. Where engines come by
                themselves this is only logged: no engine that comes may keep further routers from starting.
        """
        await self._open(sockets)
        try:
            self._check_aliases(self._settings)
        except ConfigError:
            await self.shutdown(sockets)
            raise
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        if self._seat is not None:
            self._follow_keeper(self._seat)

    def _follow_keeper(self, seat: Seat) -> None:
        """Says that this process answers. It drains when its keeper has ended, and leaves when the keeper says so."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._leave, seat)
        loop.add_reader(seat.keeper_file, self._lose_keeper, seat)
        os.set_blocking(seat.word_file, False)
        self._say_well(seat)

    def _say_well(self, seat: Seat) -> None:
        with suppress(BrokenPipeError, BlockingIOError):  # No keeper any more, or one that is stopped.
            os.write(seat.word_file, b"w")
        asyncio.get_running_loop().call_later(LOOK_S, self._say_well, seat)

    def _lose_keeper(self, seat: Seat) -> None:
        """The keeper was killed: this process has to end by itself, and to remove the folder that all shared."""
        asyncio.get_running_loop().remove_reader(seat.keeper_file)
        shutil.rmtree(seat.folder, ignore_errors=True)
        self.should_exit = True

    def _leave(self, seat: Seat) -> None:
        """Other processes take the new connections. This one answers those that it has, and engines, until they end."""
        self.router.is_leaving = True
        for server in self.servers:
            if server.sockets and server.sockets[0].getsockname()[1] in (seat.port, seat.internal_port):
                server.close()
        logger.info("process leaves connections=%d", self.router.clients.num_open)
        asyncio.get_running_loop().call_later(_LEAVE_LOOK_S, self._end_when_left, 0)

    def _end_when_left(self, num_looks: int) -> None:
        """Ends after two looks in a row without a client: the loop tells of an accepted connection in a later turn."""
        has_client = self.router.clients.num_open or self.router.services.running
        if num_looks and not has_client:
            self.should_exit = True
        else:
            asyncio.get_running_loop().call_later(_LEAVE_LOOK_S, self._end_when_left, 0 if has_client else 1)

    def _check_aliases(self, settings: Settings) -> None:
        """Raises: ConfigError: As ``startup``."""
        if settings.discovery is not Discovery.STATIC:
            return
        aliases = settings.models_by_alias
        if found := namesakes(aliases, self.router.services.all_engines(), of_bases=True):
            alias, engine = next(iter(found.items()))
            raise ConfigError(
                f"--model-alias {alias}={aliases[alias]}: {engine.name} ({engine.url}) serves a model {alias} itself: "
                "choose another NAME, or start that engine with another --served-model-name"
            )

    async def _open(self, sockets: list[socket.socket] | None) -> None:
        """Serves all sockets. uvicorn makes one kind of connection for all, so we serve those with TLS or PROXY headers
        ourselves."""
        settings = self._settings
        is_prefaced = settings.proxy_protocol is ProxyProtocol.REQUIRED
        has_tls = settings.internal_tls_cert is not None
        are_ours = (is_prefaced or settings.tls_cert is not None, has_tls, has_tls)[: len(sockets or ())]
        if not sockets or not any(are_ours):
            await super().startup(sockets)
            return
        await super().startup([sock for sock, is_ours in zip(sockets, are_ours, strict=True) if not is_ours])
        begins = (self._client_protocol, self._internal_protocol, self._internal_protocol)[: len(sockets)]
        loop = asyncio.get_running_loop()
        for sock, is_ours, begin_of in zip(sockets, are_ours, begins, strict=True):
            if is_ours:
                self.servers.append(await loop.create_server(begin_of(self.router), sock=sock, backlog=backlog()))

    def _client_protocol(self, router: Router) -> Callable[[], asyncio.Protocol]:
        """Makes the outermost protocol of a connection to the client port."""
        certificate = router.certificate
        new = (
            self._new_protocol
            if certificate is None
            else self._over_tls(router, certificate, router.clients, lambda _: Unread(router.room, RoomLimit.CLIENTS))
        )
        if self._settings.proxy_protocol is ProxyProtocol.REQUIRED:
            return partial(PrefacedConnection, self._preface_port(router, new))
        return partial(new, None)

    def _internal_protocol(self, router: Router) -> Callable[[], asyncio.Protocol]:
        """Makes the outermost protocol of a connection to the internal port, which has TLS."""
        certificate = router.internal_certificate
        assert certificate is not None
        return partial(self._over_tls(router, certificate, router.callers, router.callers.unread_of), None)

    def _new_protocol(self, preface: Preface | None) -> asyncio.Protocol:
        """HTTP for one connection. ``preface``: the proxy's header; None: the port requires none."""
        protocol = RouterProtocol(self.config, self.server_state, self.lifespan.state)
        protocol.preface = preface
        return protocol

    def _over_tls(
        self, router: Router, certificate: Certificate, clients: Counting, new_unread: NewUnread
    ) -> NewProtocol:
        port = self._tls_port(router, certificate, clients, new_unread)

        def new(preface: Preface | None) -> asyncio.Protocol:
            above = partial(self._new_protocol, preface)
            return TlsConnection(port if preface is None else replace(port, new_protocol=above))

        return new

    def _preface_port(self, router: Router, new: NewProtocol) -> PrefacePort:
        failures = router.services.failures
        return PrefacePort(
            trusts=lambda host: router.addresses.trusts(host),
            new_protocol=new,
            waiting=self.server_state.connections,
            clients=router.clients,
            on_refused=lambda reason: failures.tell(Failure(FailureKind.PROXY_REFUSED, reason=reason)),
            timeout_s=self._settings.client_read_timeout_s,
        )

    def _tls_port(self, router: Router, certificate: Certificate, clients: Counting, new_unread: NewUnread) -> TlsPort:
        failures = router.services.failures
        return TlsPort(
            context=lambda: certificate.context,
            new_protocol=partial(self._new_protocol, None),
            handshakes=router.services.handshakes.row(),
            shaking=self.server_state.connections,
            clients=clients,
            on_refused=lambda reason: failures.tell(Failure(FailureKind.TLS_REFUSED, reason=reason)),
            http_answer=_answer_of(bad_request("this port speaks TLS: use https://", "invalid_http")),
            new_unread=new_unread,
            on_no_room=lambda: failures.tell(
                Failure(FailureKind.NO_ROOM, reason=no_room(router.room.max_bytes).message)
            ),
            handshake_timeout_s=self._settings.client_read_timeout_s,
            linger_s=self._settings.client_linger_s,
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles uvicorn's signals, and SIGHUP: it reads its files anew, or ends a router without any."""
        if self._reader is None and not reads_files(self._settings):
            with super().capture_signals():
                yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            with super().capture_signals():
                yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def _reload(self) -> None:
        if not self.started or self.should_exit:
            return
        if self._reader is not None:
            self._reread_settings(self._reader)
        for watch in self.router.watches:
            watch.reload()

    def _reread_settings(self, reader: SettingReader) -> None:
        """Reads the settings anew. If they cannot be used, the old ones stay, and the log says why."""
        try:
            changes = reader.read(self.router.settings)
            self._check_aliases(changes.running)
            check_endpoints(changes.running)
        except ConfigError as error:
            logger.warning("settings not changed reason=%s", error)
            return
        if changes.taken:
            self.router.apply_settings(changes.running)
        reader.took(changes)
        logger.info("settings read anew changed=%s", ",".join(changes.taken))
        if changes.left:
            logger.warning("settings that need a restart have changed settings=%s", ",".join(changes.left))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.router.drain()
        await self.router.wait_until_idle(self.router.settings.drain_timeout_s, lambda: self.force_exit)
        await super().shutdown(sockets=sockets)
        if self.force_exit:  # else uvicorn skips the end of the lifespan, and logs a traceback of its task
            await self.lifespan.shutdown()


def listen(settings: Settings) -> tuple[list[socket.socket], Settings]:
    """Bound sockets, first the client port's, then the internal port's; and the settings with the real port numbers.

    Raises:
        ConfigError: A port is taken, or the address is not ours.
    """
    client = bind(settings.host, settings.port, "--port")
    port: int = client.getsockname()[1]
    wanted = settings.wanted_internal_port
    try:
        internal = bind(settings.host, wanted, "--internal-port")
    except ConfigError:
        client.close()
        raise
    return [client, internal], settings.model_copy(update={"port": port, "internal_port": internal.getsockname()[1]})


def bind(host: str, port: int, flag: str, *, is_shared: bool = False) -> socket.socket:
    """A listening socket. ``is_shared``: others that are shared may listen on the same port.

    Raises:
        ConfigError: The port is taken, or the address is not ours. It names ``flag``.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
    try:
        bound.bind((host, port))
        bound.listen(backlog())
    except OSError as error:
        bound.close()
        where = f"{host}:{port}"
        raise ConfigError(f"cannot listen on {where} ({error.strerror}): choose another {flag} or --host") from error
    bound.setblocking(False)
    return bound


def reads_files(settings: Settings) -> bool:
    """Whether ``settings`` name a file that is read anew on SIGHUP."""
    ports = (settings.tls_cert, settings.internal_tls_cert, settings.picker_tls_cert)
    has_key_set = settings.jwt_key_set is not None and not is_url(settings.jwt_key_set)
    files = (settings.api_key_file, settings.engines_file, settings.engine_ca, settings.engine_cert)
    return has_key_set or any(file is not None for file in (*ports, *files))


def _answer_of(error: ApiError) -> bytes:
    """All bytes of an answer with ``error``, after which the connection ends."""
    body = error.body()
    head = (STATUS_LINE[error.status], JSON, len(body))
    return b"%b%bcontent-length: %d\r\nconnection: close\r\n\r\n" % head + body


def _uvicorn_config(settings: Settings, secret: Secret, seat: Seat | None) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(settings, secret, seat),
        http=RouterProtocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",  # At level info uvicorn logs our address again.
        access_log=False,
        proxy_headers=False,  # uvicorn's would trust 127.0.0.1, and a variable; we have ``--trusted-proxies``.
        server_header=False,
        timeout_keep_alive=int(settings.client_idle_s) or 1,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        backlog=backlog(),
    )
