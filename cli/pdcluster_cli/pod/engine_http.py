"""Asks the engine in the same pod over HTTP, for ``pdcluster drain`` and ``pdcluster ready``.

The standard library only, and little of it: a probe runs every few seconds on cores that the engine needs.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pdcluster_cli import numbers
from pdcluster_protocol.launch import HTTP_PORT

_HOST_VARIABLES: Final = ("VLLM_HOST_IP", "POD_IP")
"""Variables with the engine's address, the first one first: the connector listens at it; the second is the pod's."""


class NotThere(Exception):
    """The engine's port refuses connections, or the host's name does not exist: a pod's name goes with the pod."""


class NoAnswer(Exception):
    """No whole answer came in time, though an engine may be there. The message says what went wrong."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str


def add_engine_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ) -> None:
    """Add ``--host`` and ``--port``. The host's default is in variables, which a probe's command line cannot name."""
    host = next((environ[name] for name in _HOST_VARIABLES if environ.get(name)), "localhost")
    parser.add_argument(
        "--host", default=host, help=f"of the engine (default: $VLLM_HOST_IP, else $POD_IP, else localhost; now {host})"
    )
    parser.add_argument(
        "--port", type=numbers.port, default=HTTP_PORT, help=f"of the engine's HTTP server (default: {HTTP_PORT})"
    )


def ask(host: str, port: int, path: str, *, timeout_s: float) -> Answer:
    """The answer to one GET. ``timeout_s``: for each wait on the socket.

    Raises:
        NotThere: The connection was refused, or the name does not exist any more.
        NoAnswer: There is no whole answer.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return Answer(response.status, response.read().decode("utf-8", "replace"))
    except ConnectionRefusedError as error:
        raise NotThere(f"no process listens on port {port}") from error
    except socket.gaierror as error:
        raise nameless(host, error) from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{path} does not answer: {str(error) or type(error).__name__}") from error
    finally:
        connection.close()


def nameless(host: str, error: socket.gaierror) -> NotThere | NoAnswer:
    """The error for a host without an address. If the name server does not answer, the engine may still be there."""
    if error.errno == socket.EAI_NONAME:
        return NotThere(f"the name {host} does not exist")
    return NoAnswer(f"the address of {host} is not known: {error.strerror}")
