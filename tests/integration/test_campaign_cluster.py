"""The campaign's own processes: it sees a death that it did not ask for, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from campaign.cluster import CannotStart, Cluster, Member, stable_ports, started_at
from campaign.command import orphans
from campaign.proxy import FaultProxy
from campaign.schedule import Site
from integration.processes import is_port_free, is_running
from patience import PATIENCE_S
from pdcluster_cli.zygote import EngineSpec, Zygote

pytestmark = pytest.mark.anyio

HEALTHY: Final = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    (tmp_path / "healthy.py").write_text(HEALTHY)
    (tmp_path / "broken.py").write_text("raise SystemExit('no memory')")
    with Zygote(["http.server"], env={"PYTHONPATH": str(tmp_path)}, log_path=tmp_path / "zygote.log") as started:
        yield started


@pytest.fixture
def member(tmp_path: Path) -> Member:
    (port,), (outside,) = stable_ports([1, 1], random.Random())
    spec = EngineSpec("decode-2", "healthy", (str(port),), {}, tmp_path / "decode-2.log")
    return Member("decode-2", Site.DECODE, spec, port, FaultProxy(outside, port, random.Random(1)))


async def started(zygote: Zygote, member: Member) -> Cluster:
    cluster = Cluster(zygote)
    cluster.members = [member]
    await cluster.start(member)
    return cluster


def pid_of(member: Member) -> int:
    assert member.handle is not None
    return member.handle.pid


async def until_lives(member: Member, lives: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while member.lives < lives or member.out_since is not None:
            await asyncio.sleep(0.01)


async def test_an_engine_that_ends_unasked_is_a_death_and_serves_again(zygote: Zygote, member: Member) -> None:
    cluster = await started(zygote, member)
    watching = asyncio.create_task(cluster.watch())
    os.kill(pid_of(member), signal.SIGKILL)
    await until_lives(member, 2)
    watching.cancel()
    await cluster.close()
    assert [death.name for death in cluster.deaths] == ["decode-2"]
    assert "status -9" in cluster.deaths[0].how


async def test_an_engine_that_we_kill_is_no_death_and_is_back_on_its_ports(zygote: Zygote, member: Member) -> None:
    cluster = await started(zygote, member)
    watching = asyncio.create_task(cluster.watch())
    first = pid_of(member)
    await cluster.kill(member, core_only=False, down_s=0.0)
    watching.cancel()
    assert (cluster.deaths, member.lives, is_running(first)) == ([], 2, False)
    assert member.proxy is not None
    assert not is_port_free(member.port)
    assert not is_port_free(member.proxy.port)
    assert len(member.outages) == 2  # before its first start, and now
    await cluster.close()


async def test_an_engine_that_cannot_start_ends_the_campaign_and_is_a_death(zygote: Zygote, member: Member) -> None:
    member.spec = EngineSpec("decode-2", "broken", (), {}, member.spec.log_path)
    with pytest.raises(CannotStart):
        await started(zygote, member)


async def test_outages_are_known_by_time(zygote: Zygote, member: Member) -> None:
    await started(zygote, member)
    member.outages = [(10.0, 20.0)]
    assert [member.was_out(*span) for span in [(5.0, 9.0), (5.0, 11.0), (12.0, 13.0), (19.0, 30.0), (21.0, 30.0)]] == [
        False, True, True, True, False,
    ]  # fmt: skip
    member.out_since = 40.0
    assert member.was_out(35.0, 41.0)
    assert not member.was_out(35.0, 39.0)


def test_ports_come_in_runs_of_which_none_meets_another_or_a_process_that_listens() -> None:
    """With one draw in ten that meets what is taken."""
    with socket.socket() as taken:
        (first,) = stable_ports([1], random.Random(5))
        taken.bind(("127.0.0.1", first[0]))
        lengths = [1, 2, 4] * 40
        runs = stable_ports(lengths, random.Random(5))
    assert list(map(len, runs)) == lengths
    ports = [port for run in runs for port in run]
    assert len(ports) == len(set(ports))
    assert first[0] not in ports


def test_a_process_that_still_runs_is_an_orphan_and_one_with_its_old_id_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as left:
        started_ticks = started_at(left.pid)
        assert orphans({(left.pid, started_ticks)}) == [f"process {left.pid}"]
        assert orphans({(left.pid, "1")}) == []
        left.kill()
        left.wait()
        assert orphans({(left.pid, started_ticks)}) == []
