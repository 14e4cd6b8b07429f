"""What the processes of a router ask each other, each played by an object of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from patience import EDGE_S
from pdcluster_router.processes.siblings import MAX_LIVES_APART, METRICS, Siblings, add_up_ended, counted_once

pytestmark = pytest.mark.anyio


def counted(number: int) -> bytes:
    return f"# HELP a_total A\n# TYPE a_total counter\na_total {number}.0\n".encode()


class Process:
    """One process: its metrics say how much it has counted."""

    def __init__(self, folder: Path, life: int, number: int) -> None:
        self.life = life
        self.number = number
        self.siblings = Siblings(folder, life, self._page)

    def _page(self, page: str, argument: str) -> bytes:
        if page == METRICS:
            return counted(self.number)
        if page != "echo":
            raise ValueError(f"no page {page}")
        return f"{self.life}: {argument}".encode()

    async def total(self) -> float:
        """What all processes have counted, as this one is asked."""
        [line] = [one for one in (await self.siblings.metrics()).decode().splitlines() if not one.startswith("#")]
        return float(line.split()[-1])


@asynccontextmanager
async def processes(folder: Path, *numbers: int) -> AsyncIterator[list[Process]]:
    made = [Process(folder, life, number) for life, number in enumerate(numbers, 1)]
    for process in made:
        await process.siblings.open()
    try:
        yield made
    finally:
        for process in made:
            await process.siblings.close()


async def test_a_page_has_the_answers_of_all_and_its_own_first(tmp_path: Path) -> None:
    async with processes(tmp_path, 0, 0, 0) as (_, second, _):
        answers = await second.siblings.ask_all("echo", "line\nwith \u2028 and 日本")
    assert answers == [f"{life}: line\nwith \u2028 and 日本".encode() for life in (2, 1, 3)]


async def test_a_large_answer_comes_whole(tmp_path: Path) -> None:
    async with processes(tmp_path, 0) as (first,):
        large = Siblings(tmp_path, 2, lambda *_: b"a" * (4 << 20))
        await large.open()
        assert [len(one) for one in await first.siblings.ask_all("echo")] == [3, 4 << 20]
        await large.close()


async def test_the_counts_of_a_process_stay_when_it_has_ended(tmp_path: Path) -> None:
    async with processes(tmp_path, 1, 20, 300) as (first, second, third):
        assert await first.total() == 321
        second.number = 25
        await second.siblings.close()
        assert [await first.total(), await third.total()] == [326, 326]
        first.number += 1
        assert await third.total() == 327


async def test_a_process_that_was_killed_counts_as_it_told_last(tmp_path: Path) -> None:
    async with processes(tmp_path, 1) as (first,):
        killed = await asyncio.start_unix_server(answering(tmp_path, 20), tmp_path / "2.sock")
        assert await first.total() == 21
        killed.close()
        (tmp_path / "2.sock").touch()  # It stays after SIGKILL, without a process that listens.
        assert await first.total() == 21
        (tmp_path / "2.sock").unlink()
        assert await first.total() == 21


async def test_an_answer_that_comes_late_takes_no_count_back(tmp_path: Path) -> None:
    """A process tells 10, goes on to 25 and ends, before its first answer is added."""

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answering(tmp_path, 10)(reader, writer)
        (tmp_path / "2.last").write_bytes(counted(25))

    async with processes(tmp_path, 0) as (first,):
        server = await asyncio.start_unix_server(late, tmp_path / "2.sock")
        assert await first.total() == 10
        server.close()
        (tmp_path / "2.sock").unlink(missing_ok=True)
        assert await first.total() == 25


def test_a_process_that_is_added_up_while_a_page_waits_counts_once(tmp_path: Path) -> None:
    for life in range(2, MAX_LIVES_APART + 4):
        (tmp_path / f"{life}.last").write_bytes(counted(10))
    add_up_ended(tmp_path, set())
    running, ended = counted_once(tmp_path, {1: counted(1), 2: counted(10)})
    assert running == [counted(1)]
    assert sum(_number(text) for text in ended) == 10 * (MAX_LIVES_APART + 2)


def answering(folder: Path, number: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """A process that has counted so much, and tells it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        (folder / "2.last").write_bytes(counted(number))
        writer.write(len(counted(number)).to_bytes(8, "big") + counted(number))
        writer.close()

    return answer


def _number(text: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith("a_total")]
    return float(line.split()[-1])


async def test_a_process_that_is_stopped_holds_a_page_up_for_a_bounded_time(tmp_path: Path) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_unix_server(never, tmp_path / "2.sock")
    first = Siblings(tmp_path, 1, lambda *_: counted(1), answer_s=0.05)
    async with asyncio.timeout(EDGE_S):
        assert await first.ask_all("echo") == [counted(1)]
        assert (await first.metrics()).endswith(b"a_total 1.0\n")
    silent.close()


async def test_what_is_no_question_is_not_answered_and_does_no_harm(tmp_path: Path) -> None:
    async with processes(tmp_path, 1, 2) as (first, _):
        for line in (b"\n", b"[]\n", b'["nothing",""]\n', b"x" * (64 << 10) + b"\n", b'["echo"'):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "2.sock")
            writer.write(line)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        assert await first.total() == 3


def test_many_that_have_ended_are_added_up_and_none_counts_twice(tmp_path: Path) -> None:
    total = 0
    for life in range(1, 4 * MAX_LIVES_APART):
        (tmp_path / f"{life}.last").write_bytes(counted(life))
        total += life
        add_up_ended(tmp_path, set())
        assert sum(_numbers(tmp_path, set())) == total
    assert len(list(tmp_path.glob("*.last"))) <= 2 * MAX_LIVES_APART + 2


def test_one_that_still_runs_is_not_added_up(tmp_path: Path) -> None:
    for life in range(1, MAX_LIVES_APART + 4):
        (tmp_path / f"{life}.last").write_bytes(counted(1))
    add_up_ended(tmp_path, {1, 2})
    assert sum(_numbers(tmp_path, {1, 2})) == MAX_LIVES_APART + 1
    lives = json.loads((tmp_path / "ended.last").read_text().partition("\n")[0])
    assert lives == list(range(3, MAX_LIVES_APART + 4))


def _numbers(folder: Path, running: set[int]) -> list[float]:
    told = dict.fromkeys(running, b"")
    texts = counted_once(folder, told)[1]
    return [float(line.split()[-1]) for text in texts for line in text.splitlines() if not line.startswith("#")]
