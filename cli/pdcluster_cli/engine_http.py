"""Asking the engine in the same pod over HTTP: what ``pdcluster drain`` and ``pdcluster ready`` share.

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
"""In this order: the connector listens at the first; the second is the name that a pod has for its own address."""


class NotThere(Exception):
    """The engine's port refuses connections, or its name does not exist: a pod's name goes with the pod."""


class NoAnswer(Exception):
    """Somebody may listen there, but no answer came in time, or not a whole one. The message says what did."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str


def add_engine_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ) -> None:
    """``--host`` and ``--port``. A probe's command line knows no variables, hence the defaults."""
    host = next((environ[name] for name in _HOST_VARIABLES if environ.get(name)), "localhost")
    parser.add_argument(
        "--host", default=host, help=f"of the engine (default: $VLLM_HOST_IP, else $POD_IP, else localhost; now {host})"
    )
    parser.add_argument(
        "--port", type=numbers.port, default=HTTP_PORT, help=f"of the engine's HTTP server (default: {HTTP_PORT})"
    )


def ask(host: str, port: int, path: str, *, timeout_s: float) -> Answer:
    """The answer to one GET. ``timeout_s``: for each step of it.

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
    """The meaning of a name without an address: a name server that is away says nothing of the engine."""
    if error.errno == socket.EAI_NONAME:
        return NotThere(f"the name {host} does not exist")
    return NoAnswer(f"the address of {host} is not known: {error.strerror}")
