"""The keeper, with small programs in the place of routers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_S
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role
from pdcluster_router.processes.keeper import Keeper, ListeningSockets
from pdcluster_router.processes.shared_loads import SharedLoads

pytestmark = pytest.mark.anyio

PROGRAM = """
import json, os, signal, sys, time
kind, folder = sys.argv[1:]
seat = json.loads(os.environ["PDCLUSTER_ROUTER_SEAT"])
parent = os.getppid()
log = open(f"{folder}/log", "a", buffering=1)
def tell(word): print(word, seat["life"], os.getpid(), file=log)
def on(number, word, ends):
    def heard(*_):
        tell(word)
        if ends: os._exit(0)
    signal.signal(number, heard)
on(signal.SIGTERM, "stopped", True)
on(signal.SIGUSR1, "left", True)
on(signal.SIGHUP, "reread", False)
tell("started")
while kind == "waits" and os.getppid() == parent and not os.path.exists(f"{folder}/go"): time.sleep(0.01)
if kind == "fails" or (kind == "fails-later" and seat["life"] > 2): sys.exit(2)
os.write(seat["word_file"], b"w")
while os.getppid() == parent:
    time.sleep(0.01)
    if kind != "silent": os.write(seat["word_file"], b"w")
"""


class World:
    """A keeper that runs, and the log of its programs."""

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        self.keeper = keeper
        self.folder = folder
        self.running: asyncio.Task[int] | None = None

    def told(self, word: str) -> list[tuple[int, int]]:
        """Life and process id of each program that has said ``word``."""
        log = self.folder / "log"
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        return [(int(life), int(pid)) for said, life, pid in map(str.split, lines) if said == word]

    async def until(self, is_true: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_true():
                assert self.running is None or not self.running.done(), "the keeper has ended"
                await asyncio.sleep(0.01)

    async def end(self) -> int:
        """Its status, once it has ended by itself."""
        assert self.running is not None
        async with asyncio.timeout(PATIENCE_S):
            return await self.running


@asynccontextmanager
async def keeping(folder: Path, kind: str, num: int = 2, **given: Any) -> AsyncIterator[World]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 * num)]
    (folder / "program.py").write_text(PROGRAM)
    command = (sys.executable, "-S", "-E", str(folder / "program.py"), kind, str(folder))
    places = ListeningSockets("127.0.0.1", socks[:num], socks[num:], lambda: socket.create_server(("127.0.0.1", 0)))
    shared = set(folder.glob("pdcluster-router-*"))
    world = World(Keeper(places, command, lambda: 0.0, **{"reads_files": True, **given}), folder)
    world.running = asyncio.create_task(world.keeper.run())
    try:
        yield world
    finally:
        if not world.running.done():
            world.keeper.stop()
        async with asyncio.timeout(PATIENCE_S):
            await world.running
        assert [sock.fileno() for sock in socks] == [-1] * len(socks)
        assert set(folder.glob("pdcluster-router-*")) == shared
        for _, pid in world.told("started"):
            assert not Path(f"/proc/{pid}").exists()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folders of keepers are made below it. Its path is short, as that of a Unix socket has to be."""
    with tempfile.TemporaryDirectory(prefix="k-") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


def ready(caplog: pytest.LogCaptureFixture) -> int:
    return sum("process ready" in record.message for record in caplog.records)


async def test_it_stops_all_and_leaves_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with keeping(folder, "well") as world:
        await world.until(lambda: ready(caplog) == 2)
        world.keeper.stop()
        assert await world.end() == 0
    assert sorted(life for life, _ in world.told("stopped")) == [1, 2]


async def test_one_that_is_killed_is_started_again_and_its_load_is_forgotten(folder: Path) -> None:
    async with keeping(folder, "well") as world:
        await world.until(lambda: len(world.told("started")) == 2)
        file = os.dup(world.keeper.loads_file)
        mine, killed = (SharedLoads(file, world.keeper.num_seats, seat) for seat in (0, 1))
        load, other = mine.enter(Role.DECODE, "a"), killed.enter(Role.DECODE, "a")
        assert load is not None
        assert other is not None
        other.tell(500)
        assert load.others() == 500
        os.kill(dict(world.told("started"))[2], signal.SIGKILL)
        await world.until(lambda: len(world.told("started")) == 3)
        assert load.others() == 0


async def test_files_that_cannot_be_cleared_up_leave_no_place_empty(folder: Path) -> None:
    async with keeping(folder, "well") as world:
        await world.until(lambda: len(world.told("started")) == 2)
        [shared] = folder.glob("pdcluster-router-*")
        (shared / "strange.last").mkdir()
        os.kill(dict(world.told("started"))[1], signal.SIGKILL)
        await world.until(lambda: len(world.told("started")) == 3)


async def test_one_that_was_not_ready_yet_rereads_its_files_when_it_is(folder: Path) -> None:
    async with keeping(folder, "waits") as world:
        await world.until(lambda: len(world.told("started")) == 2)
        world.keeper.reload()
        (folder / "go").touch()
        await world.until(lambda: len(world.told("reread")) == 2)
        world.keeper.reload()
        await world.until(lambda: len(world.told("reread")) == 4)


async def test_each_is_replaced_by_one_that_answers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with keeping(folder, "well") as world:
        await world.until(lambda: ready(caplog) == 2)
        world.keeper.renew()
        await world.until(lambda: "processes are replaced" in caplog.messages)
        await world.until(lambda: len(world.told("left")) == 2)
        assert sorted(life for life, _ in world.told("started")) == [1, 2, 3, 4]
        assert sorted(life for life, _ in world.told("left")) == [1, 2]


async def test_where_a_new_one_fails_the_old_ones_go_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with keeping(folder, "fails-later") as world:
        await world.until(lambda: ready(caplog) == 2)
        world.keeper.renew()
        await world.until(lambda: "processes are not replaced: a new one has failed left=2" in caplog.messages)
        assert world.told("left") == []


async def test_one_that_is_silent_is_killed_and_started_again(folder: Path) -> None:
    async with keeping(folder, "silent", num=1, look_s=0.005) as world:
        await world.until(lambda: len(world.told("started")) == 2)


async def test_it_ends_with_the_status_of_a_first_process_that_fails(folder: Path) -> None:
    async with keeping(folder, "fails") as world:
        assert await world.end() == 2


async def test_a_folder_whose_path_is_too_long_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("a" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter path"):
        Keeper(ListeningSockets("", [], [], socket.socket), (), lambda: 0.0, reads_files=True)
    assert list(long.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="set TMPDIR to one that can be written"):
        Keeper(ListeningSockets("", [], [], socket.socket), (), lambda: 0.0, reads_files=True)


async def test_where_no_file_is_read_anew_a_reload_ends_it(folder: Path) -> None:
    async with keeping(folder, "well", reads_files=False) as world:
        await world.until(lambda: len(world.told("started")) == 2)
        world.keeper.reload()
        assert await world.end() == 0
