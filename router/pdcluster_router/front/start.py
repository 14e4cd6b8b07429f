"""Starts a router: checks its settings and files, opens its ports, says where they are, and serves.

    without a seat, --processes 1    this process serves
    without a seat, more             this process is the keeper, and starts one for each place: processes/keeper.py
    with a seat                      this process is one of those

A ``ConfigError`` ends the start with one line.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.open_files import raise_open_file_limit
from pdcluster_protocol.secret import SECRET_VARIABLE, Secret, is_loopback
from pdcluster_router.engines.engine_file import read_engines
from pdcluster_router.engines.trust import check_engine_files
from pdcluster_router.front.access import Access
from pdcluster_router.front.certificates import certificate_of, internal_certificate_of, picker_certificate_of
from pdcluster_router.front.picker.start import check_picker
from pdcluster_router.front.server import RouterServer, bind, listen, reads_files
from pdcluster_router.front.setting_changes import SettingReader
from pdcluster_router.processes.keeper import SIGNALS, Keeper, ListeningSockets, serve
from pdcluster_router.processes.seat import Seat
from pdcluster_router.settings.router_settings import FLAGS, Settings
from pdcluster_router.telemetry.access_log import FLAG
from pdcluster_router.telemetry.line_file import STDOUT, LineFile
from pdcluster_router.telemetry.trace import TraceFile

logger = logging.getLogger(__name__)

Reread: TypeAlias = Callable[[], Settings]
"""Reads the settings anew."""


def run(
    settings: Settings,
    secret: Secret,
    reread: Reread | None = None,
    *,
    argv: Sequence[str] = (),
    seat: Seat | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status.

    ``reread``: for SIGHUP; None: the settings stay. ``argv``: the arguments with which each of several processes is
    started. ``seat``: of this process, if a keeper has started it.

    Raises:
        ConfigError: A port is taken, or a file cannot be used.
    """
    _check_files(settings, are_several=settings.processes > 1 or seat is not None)
    hears_hangup = reread is not None or reads_files(settings)
    if settings.processes > 1 and seat is None:
        return _keep(settings, secret, reread, argv, reads_files=hears_hangup)
    if seat is not None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # It is for the keeper, but may be sent to all.
    if hears_hangup:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # Until ``startup`` is over: then it is heard.
    raise_open_file_limit()
    reader = None if reread is None else SettingReader(settings, reread)
    if seat is None:
        sockets, settings = listen(settings)
        _tell_where(settings, secret)
    else:
        sockets, settings = _inherited(seat), seated(settings, seat)
    server = RouterServer(settings, secret, reader, seat)
    gc.collect()
    gc.freeze()  # The collector skips all objects made so far: modules and FastAPI would stop the loop for 50 ms.
    server.run(sockets=sockets)
    return 0


def seated(settings: Settings, seat: Seat) -> Settings:
    """``settings`` of the process with ``seat``. Its internal port is the one at which engines call this process."""
    changes: dict[str, object] = {"host": seat.host, "port": seat.port, "internal_port": seat.calls_port}
    if settings.advertise_url is not None:
        parts = urlsplit(settings.advertise_url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        changes["advertise_url"] = parts._replace(netloc=f"{host}:{seat.calls_port}").geturl()
    return settings.model_copy(update=changes)


def warnings_of(settings: Settings, secret: Secret) -> list[str]:
    """Warnings about who may use this router, for the person who starts it; a line each."""
    warnings = []
    if settings.api_key_file is None and settings.jwt_key_set is None:
        warnings.append("clients are not authenticated: add --api-key-file, or put a gateway in front")
    if settings.tls_cert is None and not is_loopback(settings.host):
        warnings.append("clients are served without TLS: add --tls-cert and --tls-key, or put a gateway in front")
    if settings.picker_port and not is_loopback(settings.host):
        warnings += _picker_warnings_of(settings)
    if secret.is_well_known:
        warnings.append(f"{SECRET_VARIABLE} is not set: any user of this machine may order verifications")
    return warnings


def _picker_warnings_of(settings: Settings) -> list[str]:
    if settings.picker_tls_cert is None:
        return ["gateways are answered without TLS, with the engines' key: let only them reach --picker-port"]
    if settings.picker_client_ca is None:
        told = "all that reach --picker-port are answered, with the engines' key"
        return [f"{told}: add --picker-client-ca, or let only gateways reach it"]
    return []


def _check_files(settings: Settings, *, are_several: bool) -> None:
    """Raises: ConfigError: A file cannot be used, a package is missing, or several processes cannot share one."""
    if settings.trace_file is not None:
        TraceFile(settings.trace_file).close()
    if are_several and settings.access_log == STDOUT:
        raise ConfigError("--access-log -: with --processes they would mix their lines: name a file")
    if are_several and settings.picker_port:
        raise ConfigError(
            "--picker-port: gateways ask one process, and --processes makes several: start several routers"
        )
    if settings.access_log is not None:
        LineFile(settings.access_log, FLAG).close()
    Access(settings)
    certificate_of(settings)
    internal_certificate_of(settings)
    check_engine_files(settings)
    check_picker(settings)
    picker_certificate_of(settings)
    if settings.engines_file is not None:
        read_engines(settings)


def _tell_where(settings: Settings, secret: Secret) -> None:
    """Prints where this router can be reached, and by whom. ``settings``: with the real ports."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "http" if settings.tls_cert is None else "https"
    print(f"router on {scheme}://{host}:{settings.port}", flush=True)
    scheme = "http" if settings.internal_tls_cert is None else "https"
    print(f"engines, operator and monitoring on {scheme}://{host}:{settings.internal_port}", flush=True)
    if settings.picker_port:
        bind(settings.host, settings.picker_port, "--picker-port").close()  # gRPC's own error says less.
        over = "" if settings.picker_tls_cert is None else " over TLS"
        print(f"gateways ask at {host}:{settings.picker_port}{over}", flush=True)
    for warning in warnings_of(settings, secret):
        print(warning, flush=True)


def _inherited(seat: Seat) -> list[socket.socket]:
    """The sockets of this process, as ``RouterServer`` takes them."""
    sockets = [socket.socket(fileno=file) for file in (seat.client_file, seat.calls_file, seat.internal_file)]
    for sock in sockets:
        sock.setblocking(False)
    return sockets


def _keep(settings: Settings, secret: Secret, reread: Reread | None, argv: Sequence[str], *, reads_files: bool) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # Until the keeper hears them.
    raise_open_file_limit()
    sockets = _sockets_for(settings)
    port, internal_port = sockets.ports
    try:
        _tell_where(settings.model_copy(update={"port": port, "internal_port": internal_port}), secret)
        command = (sys.executable, "-P", "-m", "pdcluster_router", *argv)
        keeper = Keeper(sockets, command, partial(_drain_s, settings, reread), reads_files=reads_files)
    except ConfigError:
        sockets.close()
        raise
    return asyncio.run(serve(keeper))


def _sockets_for(settings: Settings) -> ListeningSockets:
    """Raises: ConfigError: As ``bind``."""
    bound: list[socket.socket] = []
    try:
        for flag, port in (("--port", settings.port), ("--internal-port", settings.wanted_internal_port)):
            bind(settings.host, port, flag).close()  # Another router may share no port with this one.
            first = bind(settings.host, port, flag, is_shared=True)
            bound.append(first)
            others = range(settings.processes - 1)
            bound += [bind(settings.host, first.getsockname()[1], flag, is_shared=True) for _ in others]
    except ConfigError:
        for sock in bound:
            sock.close()
        raise
    new_calls = partial(bind, settings.host, 0, "--host")
    return ListeningSockets(settings.host, bound[: settings.processes], bound[settings.processes :], new_calls)


def _drain_s(settings: Settings, reread: Reread | None) -> float:
    """How long running requests have after SIGTERM, by what processes read now. Settings that are the keeper's own, and
    have changed, are told in the log, each time that a process starts or reads its files."""
    if reread is None:
        return settings.drain_timeout_s
    try:
        now = reread()
    except ConfigError:  # Each process tells it.
        return settings.drain_timeout_s
    if left := [FLAGS.of(name) for name in _KEEPERS if getattr(now, name) != getattr(settings, name)]:
        logger.warning("settings that need a restart have changed settings=%s", ",".join(left))
    return now.drain_timeout_s


_KEEPERS: Final = ("host", "port", "internal_port", "processes")
"""The settings that a keeper has used before any process starts."""
