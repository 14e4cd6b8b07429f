"""Connections by a deadline."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from patience import PATIENCE_S
from pdcluster_cli.pod.sockets import connect


def test_a_kernel_without_sockets_of_one_family_leaves_the_hosts_other_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        known = socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)
        other = (99, socket.SOCK_STREAM, 0, "", ("::1", port))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [other, *known])
        connect("localhost", port, time.monotonic() + PATIENCE_S).close()


def test_an_address_takes_no_thread_and_a_name_that_gets_none_is_an_error_like_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod may be at its limit of processes: `drain` must still see that requests run."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect("127.0.0.1", port, time.monotonic() + PATIENCE_S).close()
        with pytest.raises(OSError, match="localhost cannot be looked up: can't start new thread"):
            connect("localhost", port, time.monotonic() + PATIENCE_S)
