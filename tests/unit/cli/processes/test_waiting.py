"""Ports that wait for their servers."""

from __future__ import annotations

import errno
import socket

import pytest

from integration.ports import fresh_port
from pdcluster_cli.processes.engines import LOOPBACK
from pdcluster_cli.processes.waiting import held_ports


def test_a_held_port_is_for_the_server_that_reuses_addresses_and_for_nobody_else() -> None:
    with held_ports(2) as (port, other):
        assert port != other
        with socket.socket() as stranger, pytest.raises(OSError, match="in use") as refused:
            stranger.bind((LOOPBACK, port))
        assert refused.value.errno == errno.EADDRINUSE
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((LOOPBACK, port))
            server.listen()
            with socket.create_connection((LOOPBACK, port)), server.accept()[0]:
                pass
    with socket.create_server((LOOPBACK, other)):
        pass


def test_a_wished_port_is_held_first_and_by_one_only() -> None:
    wish = fresh_port()
    with held_ports(2, wish=wish) as (first, _), held_ports(1, wish=wish) as (other,):
        assert first == wish
        assert other != wish
        with socket.create_server((LOOPBACK, wish)), held_ports(1, wish=wish) as (third,):
            assert third != wish
