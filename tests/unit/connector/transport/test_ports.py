"""No port of a closed session is used again: whoever was cut off may still knock there."""

from __future__ import annotations

import os
import socket
import threading
from ctypes.util import find_library
from itertools import chain, repeat
from pathlib import Path

import pytest

from pdcluster_connector.transport.mooncake import freeing_of, listening_ports, start_on_new_ports
from pdcluster_protocol.errors import ConfigError


def listener(port: int = 0) -> socket.socket:
    """Stands for an engine: all that counts is where it listens."""
    made = socket.create_server(("127.0.0.1", port), reuse_port=True)
    assert made.getsockname()[1] in listening_ports()
    return made


def close(engine: socket.socket) -> None:
    engine.close()


def port_of(engine: socket.socket) -> int:
    port: int = engine.getsockname()[1]
    return port


def test_a_build_of_mooncake_that_cannot_end_its_writes_is_refused_by_its_file() -> None:
    libc = find_library("c")
    assert libc is not None
    with pytest.raises(ConfigError, match=f"Mooncake's build in {libc} cannot end its writes"):
        freeing_of(libc)


def test_an_engine_whose_ports_cannot_be_read_is_ended() -> None:
    started, freed = list[str](), list[str]()

    def read() -> set[int]:
        if started:
            raise OSError("too many open files")
        return set()

    with pytest.raises(ConfigError, match="too many open files"):
        start_on_new_ports(lambda: started.append("engine") or "engine", freed.append, read)  # type: ignore[func-returns-value]
    assert freed == ["engine"]


def test_a_port_of_a_closed_session_is_never_used_again() -> None:
    first = start_on_new_ports(listener, close, listening_ports)
    used = port_of(first)
    first.close()
    freed: list[int] = []

    def free(engine: socket.socket) -> None:
        freed.append(port_of(engine))
        engine.close()

    # The kernel may choose a port that an earlier test had.
    offers = chain([used, used], repeat(0))
    second = start_on_new_ports(lambda: listener(next(offers)), free, listening_ports)
    assert freed[:2] == [used, used]
    assert port_of(second) != used
    second.close()


def test_a_start_that_finds_no_new_port_ends_with_the_cure() -> None:
    used = port_of(first := start_on_new_ports(listener, close, listening_ports))
    first.close()
    with pytest.raises(ConfigError, match="MC_MIN_RPC_PORT"):
        start_on_new_ports(lambda: listener(used), close, listening_ports)
    assert used not in listening_ports()


def test_files_that_other_threads_open_and_close_meanwhile_do_not_matter() -> None:
    """In an engine they do so all the time: HTTP connections, side channels, other lanes."""
    made, is_over = listener(), threading.Event()

    def churn() -> None:
        while not is_over.is_set():
            for sock in [socket.socket() for _ in range(8)]:
                sock.close()
            Path(os.devnull).open().close()

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        seen = [listening_ports() for _ in range(400)]
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert all(port_of(made) in ports for ports in seen)
    made.close()
