"""The campaign's own processes: it sees a death that it did not ask for, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from campaign.cluster import CannotStart, Cluster, Member, stable_ports, started_at
from campaign.command import orphans
from campaign.injector import Injector
from campaign.proxy import FaultProxy
from campaign.schedule import Deed, Fault, Site
from integration.processes import is_port_free, is_running
from patience import PATIENCE_S
from pdcluster_cli.processes.zygote import EngineSpec, Zygote

pytestmark = pytest.mark.anyio

HEALTHY: Final = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        if len(sys.argv) < 3:
            return self.send_error(404)
        body = json.dumps({"results": [{"pid": 0}, {"pid": os.getpid()}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
if len(sys.argv) > 2 and not os.fork():
    time.sleep(600)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""With a second argument it says that its own process is rank 1 of two, and a child outlives it."""


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


async def started(zygote: Zygote, member: Member, exit_s: float = 10.0) -> Cluster:
    cluster = Cluster(zygote, exit_s)
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


async def test_what_outlives_a_killed_engine_has_ended_before_the_engine_is_back(
    zygote: Zygote, member: Member
) -> None:
    member.spec = replace(member.spec, argv=(str(member.port), "has a child"))
    cluster = await started(zygote, member, exit_s=0.1)
    (child,) = member.pids(core_only=True)
    await cluster.kill(member, {pid_of(member)}, down_s=0.0)
    assert (is_running(child), member.lives) == (False, 2)
    await cluster.close()


async def test_an_engine_that_we_kill_is_no_death_and_is_back_on_its_ports(zygote: Zygote, member: Member) -> None:
    cluster = await started(zygote, member)
    watching = asyncio.create_task(cluster.watch())
    first = pid_of(member)
    assert await cluster.kill(member, {first}, down_s=0.0) == 1
    watching.cancel()
    assert (cluster.deaths, member.lives, is_running(first)) == ([], 2, False)
    assert member.proxy is not None
    assert not is_port_free(member.port)
    assert not is_port_free(member.proxy.port)
    assert len(member.outages) == 2  # before its first start, and now
    await cluster.close()


def fault(deed: Deed, seconds: float = 0.05) -> Fault:
    """At the only decode engine; of two ranks it is the second's."""
    return Fault(0, Site.DECODE, deed, seconds, 0.75)


async def injected(zygote: Zygote, member: Member, folder: Path, *deeds: Deed) -> dict[str, int]:
    """What each met; the member serves when all are over."""
    cluster = await started(zygote, member, exit_s=0.5)
    metaserver = FaultProxy(0, 0, random.Random(1))
    injector = Injector(cluster, metaserver, folder / "storm", folder / "trouble.log")
    for deed in deeds:
        await injector.inject(fault(deed))
    assert member.is_running
    await cluster.close()
    assert [one.has_struck for one in injector.log] == [one.num_met > 0 for one in injector.log]
    return {one.fault.deed.name: one.num_met for one in injector.log}


async def test_a_fault_of_a_process_strikes_when_the_kernel_shows_it(
    zygote: Zygote, member: Member, tmp_path: Path
) -> None:
    """A core of which nothing runs is not struck."""
    deeds = (Deed.STOP, Deed.STOP_CORE, Deed.KILL)
    assert await injected(zygote, member, tmp_path, *deeds) == {"STOP": 1, "STOP_CORE": 0, "KILL": 1}
    assert member.lives == 2


async def test_a_fault_of_one_rank_strikes_the_process_that_the_engine_names(
    zygote: Zygote, member: Member, tmp_path: Path
) -> None:
    member.num_ranks, member.spec = 2, replace(member.spec, argv=(str(member.port), "names its ranks"))
    assert await injected(zygote, member, tmp_path, Deed.STOP_RANK, Deed.KILL_RANK) == {"STOP_RANK": 1, "KILL_RANK": 1}
    assert member.lives == 2


async def test_a_fault_of_one_rank_does_nothing_and_strikes_nothing_when_the_engine_names_none(
    zygote: Zygote, member: Member, tmp_path: Path
) -> None:
    member.num_ranks = 2
    assert await injected(zygote, member, tmp_path, Deed.STOP_RANK, Deed.KILL_RANK) == {"STOP_RANK": 0, "KILL_RANK": 0}
    assert member.lives == 1


async def test_writes_of_one_rank_strike_when_its_own_process_says_so(
    zygote: Zygote, member: Member, tmp_path: Path
) -> None:
    member.num_ranks, member.spec = 2, replace(member.spec, argv=(str(member.port), "names its ranks"))
    cluster, log = await started(zygote, member), tmp_path / "trouble.log"
    injector = Injector(cluster, FaultProxy(0, 0, random.Random(1)), tmp_path / "storm", log)
    injecting = asyncio.create_task(injector.inject(fault(Deed.WRITES_OF_RANK, seconds=0.5)))
    async with asyncio.timeout(PATIENCE_S):
        while not (tmp_path / "storm").exists():
            await asyncio.sleep(0.01)
    own, other = pid_of(member), os.getpid()
    for kind, pid in (("write of one rank late", own), ("write of one rank late", other), ("write refused", own)):
        line = {"at": time.monotonic(), "who": "decode-2", "trouble": kind, "pid": pid}
        log.write_text((log.read_text() if log.exists() else "") + json.dumps(line) + "\n")
    await injecting
    assert [one.num_met for one in injector.log] == [1]
    assert set(json.loads((tmp_path / "storm").read_text())["ranks_until"]) == {str(own)}
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
