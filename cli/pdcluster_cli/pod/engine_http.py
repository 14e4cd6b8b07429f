"""Asks the engine in the same pod over HTTP or HTTPS, for ``pdcluster drain`` and ``pdcluster ready``.

It imports little, and only from the standard library: a probe runs every few seconds on cores that the engine needs.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import ssl
import time
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from typing import Any, Final, cast

from pdcluster_cli import numbers
from pdcluster_cli.pod.sockets import connect, left_s
from pdcluster_cli.tls_flags import TlsFlags, Unusable, add_tls_flags
from pdcluster_protocol.launch import HTTP_PORT

_HOST_VARIABLES: Final = ("VLLM_HOST_IP", "POD_IP")
"""Variables with the engine's address, in order of preference: where the connector listens, then the pod's address."""
MAX_BODY_BYTES: Final = 16 << 20
"""Of an answer. Each data-parallel rank has some 100 KiB of metrics. The engine's pod pays for this memory."""

IN_THE_CLEAR: Final = TlsFlags()


class NotThere(Exception):
    """The engine's port refuses connections, or the host's name does not exist: a pod's name goes with the pod."""


class NoAnswer(Exception):
    """No whole answer came in time, though an engine may be there. The message says what went wrong."""


class NoAgreement(NoAnswer):
    """The engine is there, but has no TLS, or one end refuses the other's certificate. The message has the cure."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--host``, ``--port`` and the flags of TLS. The default host comes from the environment: the author of
    a probe's command line does not know the pod's address."""
    host = next((os.environ[name] for name in _HOST_VARIABLES if os.environ.get(name)), "localhost")
    parser.add_argument(
        "--host", default=host, help=f"of the engine (default: $VLLM_HOST_IP, else $POD_IP, else localhost; now {host})"
    )
    parser.add_argument(
        "--port", type=numbers.port, default=HTTP_PORT, help=f"of the engine's HTTP server (default: {HTTP_PORT})"
    )
    add_tls_flags(parser)


def ask(
    host: str, port: int, path: str, *, timeout_s: float, tls: TlsFlags = IN_THE_CLEAR, trusts_any: bool = False
) -> Answer:
    """The answer to one GET. ``timeout_s``: for all of it, the host's name included. ``trusts_any``: takes any
    certificate.

    Raises:
        NotThere: The connection was refused, or the name does not exist any more.
        NoAgreement: The engine is there, but has no TLS, or one end refuses the other's certificate.
        NoAnswer: There is no whole answer in time, it is too large, or the files of TLS cannot be used.
    """
    deadline = time.monotonic() + timeout_s
    connection = http.client.HTTPConnection(host, port)
    try:
        connection.sock = connect(host, port, deadline)
        if tls.is_given:
            _agree(connection, tls, trusts_any, deadline)
        return _answer_of(connection, path, tls, deadline)
    except (NoAnswer, NotThere):
        raise
    except Unusable as error:
        raise NoAnswer(str(error)) from error
    except ConnectionRefusedError as error:
        raise NotThere(f"no process listens on port {port}") from error
    except socket.gaierror as error:
        raise nameless(host, error) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswer(f"{path} does not answer: {str(error) or type(error).__name__}") from error
    finally:
        connection.close()


def _agree(connection: http.client.HTTPConnection, tls: TlsFlags, trusts_any: bool, deadline: float) -> None:
    """Put TLS over the connection's socket."""
    context = tls.any_context() if trusts_any else tls.context()
    try:
        connection.sock.settimeout(left_s(deadline))
        connection.sock = context.wrap_socket(connection.sock, server_hostname=tls.name or connection.host)
    except ssl.SSLError as error:
        raise NoAgreement(tls.told_of(error)) from error


def _answer_of(connection: http.client.HTTPConnection, path: str, tls: TlsFlags, deadline: float) -> Answer:
    try:
        connection.sock.settimeout(left_s(deadline))
        connection.request("GET", path)
        response = http.client.HTTPResponse(
            cast("socket.socket", _SocketWithDeadline(connection.sock, deadline)), method="GET"
        )
        response.begin()
        return Answer(response.status, _body_of(response).decode("utf-8", "replace"))
    except ssl.SSLError as error:
        raise NoAgreement(tls.told_of(error)) from error
    except (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected) as error:
        if not tls.is_given:
            raise
        # In TLS 1.3 a server refuses a client after the handshake, and vLLM's server then hangs up without an alert.
        raise NoAgreement(f"it hung up behind the TLS agreement: {tls.told_of_refusal}") from error


def _body_of(response: http.client.HTTPResponse) -> bytes:
    """The whole body. Not ``read()``: that takes memory for as much as the peer announces."""
    body = response.read(MAX_BODY_BYTES + 1)
    if len(body) > MAX_BODY_BYTES:
        raise http.client.HTTPException(f"it sends more than {MAX_BODY_BYTES >> 20} MiB")
    if response.length:
        raise http.client.IncompleteRead(body, response.length)
    return body


class _SocketWithDeadline(RawIOBase):
    """Stands for a socket as far as ``HTTPResponse`` uses one. Each wait gets what is left of the deadline."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def makefile(self, _mode: str) -> BufferedReader:
        return BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(left_s(self._deadline))
        return self._connection.recv_into(buffer)


def nameless(host: str, error: socket.gaierror) -> NotThere | NoAnswer:
    """The error for a host without an address. If the name server does not answer, the engine may still be there."""
    if error.errno == socket.EAI_NONAME:
        return NotThere(f"the name {host} does not exist")
    return NoAnswer(f"the address of {host} is not known: {error.strerror}")
